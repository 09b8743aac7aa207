"""Decoders of Hugging Face folders: what they look like, their weights, and one forward pass for all of them.

``resolve`` finds the folder or GGUF file, with ``hub`` and ``smollm2``, which fetch what is not here. ``folder`` reads
it with the readers of ``families`` to an ``arch``; ``gguf`` puts a GGUF file into their words. ``weights`` puts the
tensors of a ``checkpoint`` (filled in by ``filling``), a ``gguf_checkpoint`` or a ``dummy`` under our names, and
``transformer`` computes with them and with the ``ops`` of its device.

May import: core, debug, extras, gguf, kernels, lifeline, machine.
"""
