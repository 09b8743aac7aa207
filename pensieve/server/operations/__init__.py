"""Operations beside serving: metrics, traces, health, recording, housekeeping.

May import: config, core, engine.messages, errors, lifeline, machine, pensieve, server.admission, server.failures,
server.links, server.tasks, server.values, store, tracing.
"""
