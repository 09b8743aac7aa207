"""Decoders of Hugging Face folders: what they look like, their weights, and one forward pass for all of them.

``resolve`` finds the folder, ``folder`` reads it with the readers of ``families`` to an ``arch``. ``weights`` puts the
tensors of a ``checkpoint`` (filled in by ``filling``), or of a ``dummy``, under our names, and ``transformer`` computes
with them and with the ``ops`` of its device.

May import: core, kernels, machine.
"""
