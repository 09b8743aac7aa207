"""Shared by all of the door's protocols: admission, bodies, callers, failures, streams, resent histories.

May import: client, config, core, errors, hosts, rpc_status, speech.
"""
