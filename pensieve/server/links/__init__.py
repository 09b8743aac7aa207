"""Links to an engine in a supervised process of its own.

May import: config, core, debug, engine.messages, engine.process, errors, frames, lifeline, logs, server.child,
server.failures, server.tasks.
"""
