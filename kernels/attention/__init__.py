"""What ``kernels.ragged_paged_attention`` launches: how a step's attention is cut into work, and where that lies.

``tiles`` has the shapes that a program can take, ``kinds`` and ``cuts`` the rules by which a step's spans are cut,
``capacity`` the most that can come of it, ``work_lists`` the lists of one step, ``plan`` their place in device memory.
``prefixes`` finds decodes that begin alike, and ``party_lists`` has the lists of steps that read such beginnings once.
``call`` holds the tensors of one call and refuses those that do not fit. ``items`` is device code, and ``hopper`` is
the variant for that device. The reference is ``kernels.reference``, which nothing here imports.

May import: kernels.checks, kernels.spans.
"""
