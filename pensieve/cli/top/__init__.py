"""``pensieve top``: what a server is doing, live in a terminal, from the feed of its admin port (``docs/top.md``).

``feed`` asks, ``view`` is what the keys change, ``screen`` and ``strips`` draw, ``terminal`` keeps both going.

May import: cli.output, feed, options.
"""
