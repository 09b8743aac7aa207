"""Sessions: they are made, read, changed, forked, rewound, warmed and erased here.

May import: core, engine.messages, errors, server.clock, server.history, server.ids, server.links, server.settings,
server.tenants, server.turns, server.unavailable, server.values, store.
"""
