"""Options of ``pensieve serve``: one table, from which come flags, TOML keys, help and ``--print-config``.

May import: config, machine.
"""
