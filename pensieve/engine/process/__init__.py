"""The engine's loop and the process around it: frames in, steps, frames out.

May import: config, engine.messages, errors, frames, lifeline, logs.
"""
