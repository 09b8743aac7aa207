"""From logits to tokens.

``rows`` turns the requests of a step's rows into arrays, without torch; ``draw`` draws random tokens;
``sampler`` is the interface for workers. A new sampling parameter is computed in ``rows``, and applied in
``sampler`` or ``draw``.

May import: core, engine.plan.
"""
