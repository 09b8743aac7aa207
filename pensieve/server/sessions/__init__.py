"""Sessions: make, read, change, fork, rewind and erase them.

May import: core, errors, server.history, server.ids, server.turns, server.values, store.
"""
