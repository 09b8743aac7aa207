"""The KV memory of a worker: the two pools, and the copies between them that run beside the model.

``pools`` has the memory. On a GPU ``swap`` does the copies, on streams of its own: ``queue`` says which work waits for
which, ``timeline`` how far each stream has come, and ``mechanisms`` are the ways to move bytes.

May import: core, engine.plan, kernels, model.
"""
