"""Plays scripts against a target, from one process or several.

May import: core, debug, engine.process, replay.load, replay.targets.
"""
