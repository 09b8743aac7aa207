"""KV memory of a worker: the two pools, and the copies between them that run beside the model.

May import: engine.plan, kernels, model.
"""
