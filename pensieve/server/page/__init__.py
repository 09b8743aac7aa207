"""The web page on the admin port, and the feed of JSON documents behind it: ``docs/page.md``.

``web`` answers requests. ``state`` puts together what ``recent`` has heard of turns, ``strips`` of the cache and
``notes`` of the store; ``details`` is one session, ``gap`` the distance to a policy that knows the future.

May import: core, debug, engine.messages, errors, feed, hosts, pensieve, server.child, server.ids, server.links,
server.values, store.
"""
