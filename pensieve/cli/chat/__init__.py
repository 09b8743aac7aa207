"""``pensieve chat``: ``command`` opens a session, ``loop`` reads lines, ``talk`` sends them and never loses one.

May import: client, core, errors, options, spawn.
"""
