"""Responses: the client sends only the new turn; a response's id names its session and turn.

May import: client, errors, http.common, http.output, http.tools, speech.
"""
