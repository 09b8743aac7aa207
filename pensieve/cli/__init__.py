"""The ``pensieve`` command. ``main`` lists the subcommands and imports each one when it is needed.

May import: client, config, core, demo.conversations, engine.cost_profiles, engine.ranks, engine.worker, errors,
extras, feed, gguf, lifeline, machine, model, options, own_server, pensieve, rpc_status, simulate.calibrate, spawn,
store.contract, store.maintenance, tokenizer.
"""
