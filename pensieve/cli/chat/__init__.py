"""``pensieve chat``: ``command`` opens a session, ``loop`` reads lines, ``talk`` sends them and never loses one.

May import: cli.completion, cli.output, cli.server_errors, client, core, errors, machine, model, options, own_server,
spawn.
"""
