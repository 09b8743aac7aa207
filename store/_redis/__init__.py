"""What ``redis_store`` is made of: the connection, the Lua scripts, keys and values, the listing of sessions.

May import: errors, store._codec, store._listing, store._raw, store._refusals, store._rules, store.contract,
store.records.
"""
