"""Decides what each step computes, and for which requests. No torch.

``scheduler`` plans a step and takes in its result; ``request`` is one generation and its states, ``queue`` those that
wait, ``running`` those that run and how they make room for each other, ``warming`` those that no turn has asked for.

May import: config, core, engine.cache, engine.messages, engine.plan.
"""
