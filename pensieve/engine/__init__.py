"""The engine: one loop that plans a step, runs it and takes in its result, over all conversations at once.

``messages`` come in and go out, ``scheduler`` decides each ``plan`` of a step with the chunk cache (``cache``), a
worker (``worker``) executes it with its KV memory (``kv``) and chooses tokens (``sampling``). ``beams`` says which
continuations a beam search takes, ``cost`` what recomputation costs, ``process`` runs the whole in a process of its
own, ``build`` puts it together.

May import: config, core, debug, errors, frames, kernels, lifeline, logs, machine, model.
"""
