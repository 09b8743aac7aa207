"""Tools and thoughts at the door: definitions into sessions, and answers told as words, thoughts and calls.

May import: client, http.common, speech.
"""
