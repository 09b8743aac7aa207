"""``pensieve chat``: ``command`` runs the loop, ``dialogue`` sends lines and never loses one.

May import: cli.completion, cli.output, cli.server_errors, client, core, errors, machine, model, options, own_server,
spawn.
"""
