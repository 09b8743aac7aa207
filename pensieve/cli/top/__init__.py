"""``pensieve top``: a server's activity, live, from the feed of its admin port (``docs/top.md``).

``feed`` makes the requests, ``screen`` draws, ``command`` runs the loop and reads keys.

May import: cli.admin, cli.output, feed.
"""
