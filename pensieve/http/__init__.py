"""The HTTP door: OpenAI's protocols in front of the same durable sessions. Needs the extra ``http``.

One ASGI application (``app.make_app``), run by ``pensieve gateway`` and, as its child process, by ``pensieve serve
--http``. It speaks to the conversation service through the SDK and holds no state that an answer depends on: ids name
sessions and turns, and what it remembers of them only saves a look-up. JSON is decoded into ``msgspec`` structs,
because those check every field and name the wrong one; what is sent is plain dictionaries, which the tests hold against
the types of OpenAI's own SDK.

May import: client, core, errors, hosts, lifeline, logs, rpc_status, speech, tracing.
"""
