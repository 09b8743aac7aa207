"""Options of ``pensieve serve``: one table, from which come flags, TOML keys, help and ``--print-config``.

``commands`` serves every command: how its help is laid out, and how it says what is wrong.

May import: config, machine.
"""
