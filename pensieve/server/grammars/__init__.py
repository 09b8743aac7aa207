"""Checks the grammars that callers want their answers to follow, before an engine gets them.

The library that compiles a grammar can be asked for work without end, and cannot be interrupted. So it runs in a
process of its own (``process``), with limits of time and memory. ``check`` is what that process computes,
``checker`` the server's end.

May import: debug, errors, frames, lifeline, server.child, speech.
"""
