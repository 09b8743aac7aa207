"""Structured output: which tokens a grammar allows next, computed on threads beside the steps. No torch.

``prototypes`` compiles each grammar once. ``structured`` follows one answer per request. Both use llguidance. A
matcher is a function of the grammar and the output tokens, so nothing here needs to outlive the engine.

May import: core, engine.messages, engine.plan, engine.scheduling, errors.
"""
