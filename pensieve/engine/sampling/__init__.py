"""From logits to tokens: what each row asks for, what that changes, and the draw.

``rows`` turns what a step's rows ask for into arrays, without torch; ``draw`` draws random tokens; ``sampler`` is what
workers call. A new sampling parameter is computed in ``rows``, and applied in ``sampler`` or ``draw``.

May import: core, engine.plan.
"""
