"""gRPC: authentication, validation, conversion between messages and values, errors on the wire.

May import: config, core, engine.messages, errors, hosts, logs, renewed_files, rpc_status, server.clock,
server.conversations, server.failures, server.grammars, server.ids, server.keys, server.links, server.operations,
server.sessions, server.settings, server.turns, server.values, speech, store, tracing, v1.
"""
