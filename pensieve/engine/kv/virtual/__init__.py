"""Memory that a device tier takes and gives back while it serves, behind addresses that stay (vAttention, section 5.2).

``region`` reserves one range of addresses and backs it from both ends with handles of physical memory. Two backends
make the handles: ``driver`` on an NVIDIA GPU, ``plain`` on a CPU. ``backing`` lets a region follow the plans of a
worker.

May import: nothing else of Pensieve.
"""
