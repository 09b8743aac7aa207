"""The engine: one loop that plans a step, runs it and takes in its result, over all conversations at once.

``messages`` come in and go out. ``scheduling`` decides each ``plan`` of a step with the chunk cache (``cache``). A
worker (``worker``) executes it with its KV memory (``kv``) and chooses tokens (``sampling``). ``beams`` drives beam
searches over the scheduler, ``strips`` shows where chunks lie, ``cost`` says what recomputation costs. ``process`` runs
the whole in a process of its own, ``build`` puts it together.

May import: config, core, debug, errors, frames, kernels, lifeline, logs, machine, model.
"""
