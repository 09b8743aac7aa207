"""Reports for people: tables, curves, pictures, one HTML page, comparisons.

May import: replay.load, replay.measure.
"""
