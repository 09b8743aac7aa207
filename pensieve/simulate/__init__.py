"""Capacity planning and policy studies without a GPU: scheduler and cache under a virtual clock. No torch.

``full``   the real engine (``Engine``, ``Scheduler``, ``CacheManager``) with a worker that only models step times
``turns``  whole turns as events, on a twin of ``CacheManager`` that is tested to make the same decisions

Both engines simulate a ``scenario``. ``run`` starts them, ``report`` writes the same report as a replay, and
``history`` reads a load from a server's store.

May import: config, core, engine, errors, lifeline, model.groups, replay, store.contract, store.maintenance,
store.records.
"""
