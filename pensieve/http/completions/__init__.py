"""Completions: text or token ids that go to the model as they are, without the chat template.

May import: client, errors, http.common.
"""
