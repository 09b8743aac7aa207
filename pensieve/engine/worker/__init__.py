"""Executes plans, in plain torch or on an NVIDIA GPU, and determines what fits on the device.

``sizing`` comes first: device, dtype, limits, sizes of the tiers (with ``hybrid_sizing``).
``torch_worker`` runs everything in sequence. ``cuda_worker`` queues everything and waits for nothing, with a
``program`` per step size, most of them as CUDA ``graphs``. Both make their batch from the same ``spans``.

May import: config, core, engine.cache.pages, engine.kv, engine.plan, engine.sampling, kernels, machine, model.
"""
