"""Options of ``pensieve serve``: one table defines the flags, TOML keys, help and ``--print-config``.

``commands`` serves every command: the layout of help, and error messages.

May import: client, config, errors, machine.
"""
