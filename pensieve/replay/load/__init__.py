"""The load of a replay: conversations as lengths, read or drawn, cut to size, with the times of their turns.

May import: core.
"""
