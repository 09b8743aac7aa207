"""From logits to tokens: what each row asks for, what that changes, and the draw.

``rows`` turns what a step's rows ask for into arrays, ``changes`` those that change logits; ``apply`` applies them
where the logits are, ``draw`` draws random tokens, and ``sampler`` is what workers call.

May import: core, engine.plan.
"""
