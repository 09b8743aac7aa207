"""Mutation testing: sample small faults of the sources, run the tests that reach them, record which are caught."""
