"""The HTTP door: OpenAI's protocols and Anthropic's in front of the same durable sessions. Needs the extra ``http``.

One ASGI application (``app.make_app``), run by ``pensieve gateway``, and as a child process by ``pensieve serve
--http``. It calls the conversation service through the SDK. No answer depends on state in the door: ids name
sessions and turns, and its caches only save lookups. Bodies are decoded into ``msgspec`` structs, which check
every field and name the wrong one. Answers are plain dictionaries; the tests check them against the types of
both SDKs.

May import: client, config, core, errors, grpc_thread, hosts, lifeline, logs, renewed_files, rpc_status, speech,
tracing.
"""
