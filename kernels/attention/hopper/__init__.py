"""The variant of the attention kernel for Hopper devices: one warp loads, two warp groups compute.

May import: kernels.attention.kinds.
"""
