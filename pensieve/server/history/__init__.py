"""History: the items of a session, folded from its records and cached, and the model's context made of them.

May import: core, errors, server.values, speech, store, tokenizer.
"""
