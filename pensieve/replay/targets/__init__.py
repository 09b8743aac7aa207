"""Systems under test: Pensieve, servers with the OpenAI protocol, and servers that the replay starts itself.

May import: client, core, lifeline, spawn, v1.
"""
