"""A worker's KV memory: the two pools, and the copies between them that run alongside the model.

``pools`` holds the memory. Pages of models with two KV groups, and of elastic tiers, lie as ``grid`` says; ``virtual``
makes the memory of an elastic tier come and go. On a GPU ``swap`` does the copies, on its own streams: ``queue``
orders the work, ``timeline`` tracks how far each stream has come, and ``mechanisms`` are the ways to move bytes.
``recomputed`` compares chunks that are computed again with what they were.

May import: config, core, engine.cache.pages, engine.plan, kernels, model.
"""
