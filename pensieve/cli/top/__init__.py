"""``pensieve top``: a server's activity, live, from the feed of its admin port (``docs/top.md``).

``screen`` draws, ``command`` asks the server, runs the loop and reads keys.

May import: cli.admin, cli.output, feed.
"""
