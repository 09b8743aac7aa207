"""``pensieve chat``: ``command`` opens a session, ``loop`` reads lines, ``talk`` sends them and never loses one.

May import: cli.completion, cli.refusals, cli.untrusted, client, core, errors, machine, model, options, own_server,
spawn.
"""
