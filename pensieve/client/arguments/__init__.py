"""What callers of the SDK write: options with their meanings, names that are nearly right, words, ids of their own.

May import: core, errors.
"""
