"""Makes numbers of what was played: windows, receipts, latencies, and whether they may be believed.

May import: pensieve, replay.records.
"""
