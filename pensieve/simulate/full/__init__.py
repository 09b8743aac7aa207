"""The ``full`` engine: what serves, step by step, on virtual time.

May import: config, core, engine, simulate.scenario.
"""
