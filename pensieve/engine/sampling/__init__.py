"""From logits to tokens: what each row asks for, what that changes, and the draw.

May import: core, engine.plan.
"""
