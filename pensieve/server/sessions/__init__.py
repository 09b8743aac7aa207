"""Sessions: they are made, read, changed, forked, rewound and erased here.

May import: core, errors, server.clock, server.history, server.ids, server.links, server.settings, server.turns,
server.values, store.
"""
