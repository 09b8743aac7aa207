"""Responses: only the new turn travels; the id of a response names the session and the turn that it is.

May import: client, errors, http.common, http.output, http.tools, speech.
"""
