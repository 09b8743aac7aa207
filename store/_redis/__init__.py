"""The parts of ``redis_store``: Redis clients and connection, Lua scripts, keys and values, the listing.

May import: errors, store._codec, store._listing, store._raw, store._refusals, store._rules, store.contract,
store.records.
"""
