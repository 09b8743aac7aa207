"""Capacity planning and policy studies without a GPU: scheduler and cache under a virtual clock. No torch.

``full``   the real engine (``Engine``, ``Scheduler``, ``CacheManager``) with a worker that only knows what a step costs
``turns``  whole turns as events on a twin of ``CacheManager`` that is tested to decide the same

Both simulate a ``scenario``; ``run`` starts them, ``report`` writes what a replay would write.

May import: config, core, engine, lifeline, replay.
"""
