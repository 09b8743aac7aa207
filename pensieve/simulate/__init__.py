"""Capacity planning and policy studies without a GPU: scheduler and cache under a virtual clock. No torch.

``full``   the real engine (``Engine``, ``Scheduler``, ``CacheManager``) with a worker that only knows what a step costs
``turns``  whole turns as events on a twin of ``CacheManager`` that is tested to decide the same

Both simulate a ``scenario``; ``run`` starts them, ``report`` writes what a replay would write. ``history`` reads the
load from the store of a server, and finds the gap between what was served and what the future would have told.

May import: config, core, engine, errors, lifeline, replay, store.contract, store.maintenance, store.records.
"""
