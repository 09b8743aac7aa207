"""What ``kernels.ragged_paged_attention`` launches: how a step's attention is cut into work, and where that lies.

``tiles`` has the shapes that a program can take, ``kinds`` the rules by which a step's spans are cut and the most that
can come of it, ``work_lists`` the lists of one step, ``plan`` their place in device memory. ``prefixes`` finds decodes
that begin alike, and ``party_lists`` has the lists of steps that read such beginnings once. ``check`` refuses arguments
that do not fit. ``items`` is device code, and ``hopper`` is the variant for that device. The reference is
``ragged_paged_attention`` of ``kernels.reference``, which nothing here imports.

May import: kernels.checks, kernels.span_table.
"""
