"""Options of ``pensieve serve``: one table, from which come flags, TOML keys, help and ``--print-config``.

``groups`` and ``complaints`` are of every command: how its help is laid out, and how it tells what is wrong.

May import: config, machine.
"""
