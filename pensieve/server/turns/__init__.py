"""Turns: each begins in the store, is generated, streamed to any number of callers, and committed.

May import: core, debug, engine.messages, errors, logs, server.admission, server.clock, server.failures,
server.grammars, server.history, server.ids, server.links, server.settings, server.values, speech, store, tokenizer.
"""
