"""The web page on the admin port, and the feed of JSON documents behind it: ``docs/page.md``.

``web`` answers requests. ``state`` puts together what ``recent`` has heard of turns and ``watching`` asks of cache and
store.

May import: core, engine.messages, errors, feed, hosts, pensieve, server.conversations, server.ids, server.links,
server.operations, server.values, store.
"""
