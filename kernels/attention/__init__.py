"""What ragged paged attention is made of: how a step's work is cut, listed and laid into buffers.

May import: kernels.checks, kernels.span_table.
"""
