"""What is simulated and counted: load, machine, policies, settings, sums over turns.

May import: config, core, engine.cache, engine.cost, engine.plan, replay.load, replay.measure.
"""
