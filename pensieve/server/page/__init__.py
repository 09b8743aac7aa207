"""The web page on the admin port, and the feed of JSON documents behind it: ``docs/page.md``.

``web`` answers requests. ``state`` puts together what ``recent`` has heard of turns, ``strips`` of the cache and
``notes`` of the store; ``details`` is one session.

May import: core, debug, engine.messages, errors, hosts, pensieve, server.child, server.ids, server.links,
server.operations, server.values, store.
"""
