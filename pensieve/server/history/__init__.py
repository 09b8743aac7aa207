"""History: what was said in a session so far, folded from its records and cached, and the model's context made of it.

May import: core, errors, server.values, speech, store, tokenizer.
"""
