"""Decoders of Hugging Face folders: what they look like, their weights, and one forward pass for all of them.

May import: core, kernels, machine.
"""
