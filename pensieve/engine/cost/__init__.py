"""What it costs to recompute a chunk: the model of it, its measurement, and where measurements are kept.

May import: config, core, engine.plan, machine, model.
"""
