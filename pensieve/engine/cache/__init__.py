"""Which chunks of which session lie where, and which give way next: the only writer is ``CacheManager``. No torch.

May import: config, core, engine.cost, engine.plan.
"""
