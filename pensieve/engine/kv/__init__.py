"""KV memory of a worker: the two pools, and the copies between them that run beside the model.

May import: core, engine.plan, kernels, model.
"""
