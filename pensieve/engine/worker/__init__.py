"""Executes plans, on plain torch or on an NVIDIA GPU, and finds out what fits on the device.

May import: config, core, engine.kv, engine.plan, engine.sampling, kernels, machine, model.
"""
