"""Ranks: one model divided over several GPUs, or over several processes on a CPU.

The engine process is rank 0; it plans, and a ``crew`` of processes, each with a ``follower``, does the same steps on
its own shard of weights and of both tiers. What travels is the plan, as bytes (``codec``) in shared memory (``ring``);
sums over ranks are the business of ``collectives``, and ``leader`` is the worker that the engine sees.

May import: config, core, debug, engine.plan, engine.process, engine.worker, kernels, lifeline, logs, model.
"""
