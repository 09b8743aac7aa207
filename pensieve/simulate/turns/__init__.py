"""The ``turns`` engine: runs of similar steps are one event, on a cache of one byte per chunk.

May import: config, core, engine.cache, engine.cost, engine.scheduling, replay.load, simulate.scenario.
"""
