"""The engine's loop and the process around it: frames in, steps, frames out.

May import: config, core, engine.messages, engine.plan, errors, frames, lifeline, logs.
"""
