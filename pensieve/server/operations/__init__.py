"""What a server does besides answering: metrics, traces, health, the admin port, recording, housekeeping.

May import: config, core, engine.messages, errors, machine, pensieve, server.links, server.tasks,
server.values, store, tracing.
"""
