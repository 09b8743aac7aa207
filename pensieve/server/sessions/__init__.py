"""Creates, reads, updates, forks, rewinds, compacts, warms, deletes, exports and imports sessions.

May import: core, debug, engine.messages, errors, server.clock, server.failures, server.history, server.ids,
server.keys, server.links, server.settings, server.tasks, server.turns, server.values, speech, store.
"""
