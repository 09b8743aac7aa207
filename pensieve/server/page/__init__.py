"""The web page on the admin port, and the JSON documents behind it: ``docs/page.md``.

``web`` answers requests. ``state`` combines turns that it recorded with what it polls from the cache and the store.

May import: core, engine.messages, errors, feed, hosts, pensieve, server.conversations, server.ids, server.links,
server.operations, server.values, store.
"""
