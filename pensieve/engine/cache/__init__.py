"""The KV cache: which chunks are in which tier, and which are evicted next. Each field has one writer. No torch.

May import: config, core, engine.cost, engine.plan.
"""
