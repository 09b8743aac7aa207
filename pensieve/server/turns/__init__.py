"""Turns: begin in the store, generate, stream to any number of callers, commit.

May import: core, debug, engine.messages, errors, server.bugs, server.clock, server.history, server.ids, server.links,
server.settings, server.unavailable, server.values, store, tokenizer.
"""
