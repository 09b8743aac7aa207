"""What all of the door's protocols share: bodies, callers, failures, streams, and where a resent history ends.

May import: client, errors, speech.
"""
