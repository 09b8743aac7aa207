"""Creates, reads, updates, forks, rewinds, warms and deletes sessions.

May import: core, engine.messages, errors, server.clock, server.history, server.ids, server.links,
server.settings, server.tenants, server.turns, server.unavailable, server.values, store.
"""
