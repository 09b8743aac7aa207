"""Creates, reads, updates, forks, rewinds, compacts, warms, deletes, exports and imports sessions.

May import: core, debug, engine.messages, errors, server.bugs, server.clock, server.history, server.ids, server.links,
server.settings, server.tasks, server.tenants, server.turns, server.unavailable, server.values, speech, store.
"""
