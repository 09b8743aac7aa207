"""Links to an engine: in a process of its own, which is supervised.

May import: config, core, debug, engine.messages, engine.process, errors, frames, lifeline, logs, server.child,
server.tasks, server.unavailable.
"""
