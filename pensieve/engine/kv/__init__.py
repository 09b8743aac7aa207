"""The KV memory of a worker: the two pools, and the copies between them that run beside the model.

``pools`` has the memory and ``pinned`` its host part. On a GPU ``swap`` does the copies: ``queue`` says which work
waits for which, ``timeline`` how far each stream has come, ``lanes`` are the streams, ``mechanisms`` the ways to move
bytes, and ``groups`` the layers that arrive together.

May import: core, engine.plan, kernels, model.
"""
