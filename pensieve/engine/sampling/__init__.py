"""From logits to tokens.

``rows`` turns the requests of a step's rows into arrays, without torch; ``sampler`` chooses tokens, and is the
interface for workers. A new sampling parameter is computed in ``rows``, and applied in ``sampler``.

May import: core, engine.plan.
"""
