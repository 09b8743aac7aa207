"""Conversations: sessions under OpenAI's names; responses are added to them with ``conversation``.

May import: client, errors, http.common, http.responses, speech.
"""
