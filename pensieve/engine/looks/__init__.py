"""Looks: where the chunks of sessions lie, told between steps to whoever asks.

May import: core, engine.cache, engine.messages, engine.plan, engine.request, engine.scheduler.
"""
