"""Decoder models: their architecture, their weights, and one forward pass for all of them.

``resolve`` finds the folder or GGUF file, or downloads it from a hub; ``smollm2`` downloads that model. ``folder``
reads it into an ``arch`` with the readers of ``families``; ``gguf`` translates a GGUF file's metadata for them.
``groups`` sorts the layers by what they cache. ``weights`` assembles the tensors, by their ``tensor_names``, of a
``tensor_source``: a ``checkpoint`` (``quantisation`` and ``unpacking`` know quantised ones), a
``gguf_checkpoint`` or random weights. ``transformer`` computes with them and with the ``ops`` of its device;
``recurrent`` has its mixers other than attention, ``experts`` its mixtures of experts.

May import: config, core, debug, extras, gguf, kernels, lifeline, machine.
"""
