"""Reports for people: tables, curves, plots, one HTML page, comparisons.

May import: replay.load, replay.measure.
"""
