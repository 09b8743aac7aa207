"""What all of the door's protocols share: who may come in, bodies, callers, failures, streams, resent histories.

May import: client, core, errors, hosts, rpc_status, speech.
"""
