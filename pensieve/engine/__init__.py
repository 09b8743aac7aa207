"""The engine: one loop that plans a step, runs it and takes in its result, over all conversations at once.

``messages`` come in and go out. ``scheduling`` makes each step's ``plan``, with the chunk cache (``cache``). A worker
(``worker``) executes it with its KV memory (``kv``) and chooses tokens (``sampling``). ``beams`` drives beam searches
over the scheduler, ``grammar`` finds the tokens that a grammar allows, ``elastic`` sets the size of an elastic device
tier, ``strips`` shows where chunks are, ``cost`` models the cost of recomputation, ``cost_profiles`` measures it.
``process`` runs all of it in its own process, ``build`` puts it together.

May import: config, core, debug, errors, frames, kernels, lifeline, logs, machine, model, tokenizer.
"""
