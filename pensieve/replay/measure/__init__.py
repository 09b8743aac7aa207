"""From what was played to numbers: windows, receipts, latencies, and whether they may be believed.

May import: pensieve, replay.records.
"""
