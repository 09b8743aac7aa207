"""What is measured: Pensieve, any server with the OpenAI protocol, and servers that the tool starts itself.

May import: client, core, lifeline, spawn, v1.
"""
