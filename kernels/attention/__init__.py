"""Work planning for ``kernels.ragged_paged_attention``: splits a step's attention into work items.

``tiles`` has the tile shapes, ``kinds`` and ``cuts`` the rules by which spans are split, ``capacity`` the
upper bounds of the result. ``work_lists`` makes the lists of one step and ``plan`` puts them into device
memory. ``prefixes`` finds decodes with a common prefix; ``group_lists`` makes work lists that read such a
prefix once. ``call`` holds and checks the tensors of one call. ``items`` is device code; ``hopper`` is the
variant for Hopper devices. The reference is ``kernels.reference``, which nothing here imports.

May import: kernels.arguments, kernels.checks, kernels.kv_codec, kernels.spans.
"""
