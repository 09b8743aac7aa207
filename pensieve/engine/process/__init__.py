"""The engine's loop and the process around it: commands in, steps, reports out.

May import: config, core, engine.messages, engine.plan, errors, frames, lifeline, logs.
"""
