"""Sessions: make, read, change, fork, rewind and erase them.

May import: core, errors, server.clock, server.history, server.ids, server.links, server.settings, server.turns,
server.values, store.
"""
