"""gRPC: who may call, what a message may say, messages to values and back, errors on the wire.

May import: core, engine.messages, errors, logs, rpc_status, server.bugs, server.clock, server.conversations,
server.ids, server.keys, server.links, server.operations, server.pace, server.sessions, server.settings,
server.tenants, server.turns, server.values, speech, store, tracing, v1.
"""
