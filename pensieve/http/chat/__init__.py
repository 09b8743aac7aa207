"""Chat completions: the client resends its history, and the door finds the session that it goes on with.

May import: client, errors, http.common, http.tools, speech.
"""
