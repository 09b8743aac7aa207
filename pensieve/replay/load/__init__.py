"""What is replayed: conversations as lengths, read or drawn, cut to size, and when each turn is due.

May import: core.
"""
