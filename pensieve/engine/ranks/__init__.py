"""Tensor parallelism: one model divided over several GPUs, or over several processes on a CPU.

The engine process is rank 0. It plans; the processes that its ``supervisor`` starts
execute the same steps on their own shard of the weights and of both tiers. Plans travel as
bytes (``codec``) through shared memory (``ring``). Reductions over ranks are in ``collectives``; ``leader``
has the worker that the engine sees, and the loop of the other ranks.

May import: config, core, debug, engine.plan, engine.process, engine.worker, kernels, lifeline, logs, model.
"""
