"""How soon sessions come back, learned while serving or told by clients, and what holding their chunks is worth then.

May import: core.
"""
