"""Decides what each step computes, and for which requests. No torch.

``scheduler`` plans a step and takes in its result. ``request`` is one generation and its states, ``queue`` the
waiting requests, ``running`` the batch and how its requests make room for each other, ``warming`` the warm-ups.
``drafting`` decides which requests get drafts, ``drafts`` finds them.

May import: config, core, engine.cache, engine.elastic, engine.messages, engine.plan.
"""
