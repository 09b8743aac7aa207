"""``pensieve sessions``: the sessions of a server over gRPC: listed, shown with their turns' receipts, erased.

May import: cli.completion, cli.figures, cli.output, cli.refusals, cli.untrusted, client, errors, options.
"""
