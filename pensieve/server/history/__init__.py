"""What a session has said so far: its folded history, kept for a while, and the model's context made of it.

May import: core, errors, server.values, store, tokenizer.
"""
