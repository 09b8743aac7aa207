"""The front end: conversations over gRPC, in front of an engine and a history store.

``app`` is the composition root. ``rpc`` translates between messages and values. ``conversations`` is the service
without gRPC: ``turns``, admitted by ``admission``, and ``sessions`` over ``history``, with an engine behind
``links``. ``operations`` runs beside the service: metrics, health, recordings. ``page`` is the web page of the admin
port.

May import: config, core, debug, engine.messages, engine.process, errors, feed, frames,
grpc_thread, hosts, lifeline, logs, machine, model, options, pensieve, renewed_files, rpc_status, speech, store,
tokenizer, tracing, v1.
"""
