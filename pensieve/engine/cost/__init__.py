"""The cost of recomputing a chunk: its model, its measurement, and the stored profiles.

May import: config, core, engine.plan, machine, model.
"""
