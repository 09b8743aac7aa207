"""``pensieve chat``: ``command`` runs the loop, ``dialogue`` sends lines and never loses one.

May import: cli.output, client, core, errors, machine, model, options, own_server, spawn.
"""
