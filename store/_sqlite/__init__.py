"""The parts of ``sqlite_store``: the file with its lock and schema, threads that change and read it, and the SQL.

May import: errors, store._codec, store._listing, store._raw, store._refusals, store._rules, store.contract,
store.records.
"""
