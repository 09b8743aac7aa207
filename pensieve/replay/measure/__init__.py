"""Condenses a replay to numbers: windows, receipts, latencies, and whether the measurement is valid.

May import: pensieve, replay.records.
"""
