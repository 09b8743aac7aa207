"""Admission: whether a new turn may join, decided before anything is looked up, tokenised or written.

``gate`` decides, from what waits (``backlog``), how fast that goes (``speed``) and what a tenant may use (``quotas``).

May import: core, errors, server.tenants, server.values.
"""
