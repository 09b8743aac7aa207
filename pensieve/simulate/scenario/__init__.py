"""The simulated scenario: load, machine, policies, settings, and sums over turns.

May import: config, core, engine.cache, engine.cost, engine.plan, replay.load, replay.measure.
"""
