"""How soon sessions return, learned while serving or hinted by clients, and the value of keeping their chunks.

May import: core.
"""
