"""The simulated scenario: load, machine, policies, settings, and sums over turns.

May import: config, core, engine.cache, engine.cost, engine.plan,
engine.worker.hybrid_sizing, model.groups, replay.load, replay.measure.
"""
