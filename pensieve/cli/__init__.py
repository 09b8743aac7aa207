"""The ``pensieve`` command: ``main`` names the subcommands, and each is imported when it is asked for.

May import: client, config, core, engine.cost, engine.ranks, errors, extras, feed, gguf, lifeline, machine, model,
options, own_server, pensieve, simulate.calibrate, spawn, store.contract, store.maintenance, tokenizer.
"""
