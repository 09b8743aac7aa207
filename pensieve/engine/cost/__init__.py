"""The cost of recomputing a chunk: its model, its measurement, and the stored profiles.

May import: config, core, engine.cache.pages, engine.kv.grid, engine.plan, machine, model.
"""
