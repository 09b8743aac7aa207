"""``pensieve store``: look after a history store: check, repair, backup, restore, move, usage.

May import: cli.output, errors, options, store.contract, store.maintenance.
"""
