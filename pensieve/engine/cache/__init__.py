"""Which chunks of which session lie where, and which give way next. Each field has one writer. No torch.

May import: config, core, engine.cost, engine.plan.
"""
