"""Attention kernel for Hopper devices: one warp loads, two warp groups compute.

May import: kernels.attention.call, kernels.attention.kinds, kernels.attention.work_lists, kernels.spans.
"""
