"""The ``pensieve`` command. ``main`` lists the subcommands and imports each one when it is needed.

May import: client, config, core, engine.cost, engine.ranks, errors, extras, feed, gguf, lifeline, machine,
model, options, own_server, pensieve, rpc_status, simulate.calibrate, spawn, store.contract, store.maintenance,
tokenizer.
"""
