"""gRPC: authentication, validation, conversion between messages and values, errors on the wire.

May import: config, core, engine.messages, errors, logs, rpc_status, server.bugs, server.clock,
server.conversations, server.grammars, server.ids, server.keys, server.links, server.operations, server.pace,
server.sessions, server.settings, server.tenants, server.turns, server.values, speech, store, tracing, v1.
"""
