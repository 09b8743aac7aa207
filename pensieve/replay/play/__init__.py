"""Plays scripts against a target, from one process or several.

May import: debug, engine.process, replay.load, replay.records, replay.targets.
"""
