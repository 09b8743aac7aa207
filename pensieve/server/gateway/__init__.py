"""The HTTP door of this server: a process of its own, kept alive here and told when to drain.

A process, because one that streams is busy with Python at all times, and would slow this one down. It speaks to the
service over a private socket, with the credentials that its callers send.

May import: debug, server.child, server.tasks.
"""
