"""What ``sqlite_store`` is made of: the file with its lock and schema, and the SQL over one session's rows.

May import: errors, store._clock, store._codec, store._listing, store._raw, store._refusals, store._rules,
store.contract, store.records.
"""
