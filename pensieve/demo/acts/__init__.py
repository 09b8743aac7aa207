"""The acts of ``pensieve demo``: what is held on which servers, how it is checked and how it is drawn.

May import: client, demo.talk, own_server.
"""
