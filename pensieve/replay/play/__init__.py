"""Plays scripts against a target, from one process or several.

May import: core, debug, frames, replay.load, replay.records, replay.targets.
"""
