"""The kernels of recurrent layers, compiled for an H200 without one."""

from __future__ import annotations

import pytest
import triton

from pensieve.kernels import state_step
from support.kernels.compiled_kernels import CUOBJDUMP, build
from support.kernels.recurrence_cases import Kind, make_layer

REGISTERS, THREADS = 65536, 256
"""Registers of a Hopper multiprocessor, and threads that must be resident to hide memory: two programs, each with the
whole state that it loads on the way at once."""


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of Triton brings no CUDA tools")
@pytest.mark.parametrize(
    ("kind", "key_heads", "heads", "key", "value"),
    [("gated_delta", 16, 32, 128, 128), ("ssd", 1, 80, 128, 64), ("ssd", 1, 128, 256, 64)],
)
def test_states_stay_in_registers(kind: Kind, key_heads: int, heads: int, key: int, value: int) -> None:
    layer = make_layer(kind, heads=heads, key_heads=key_heads, key=key, value=value)
    types = {name: "*bf16" for name in ("mixed", "gates", "out")} | {
        name: "*fp32" for name in ("states", "decay", "step_bias", "skip")
    }
    types |= {"chains": "*i32", "lowest": "fp32", "highest": "fp32"}
    fixed = state_step.step_constants(layer, heads, key, value)
    binary = build(state_step._step, types, fixed, {"enable_fp_fusion": True})
    assert binary.stack == 0
    assert binary.registers * THREADS <= REGISTERS
    assert "ld.global.v4.b32" in binary.ptx and "st.global.v4.b32" in binary.ptx
    assert triton.next_power_of_2(key) * state_step.value_block(key, value) <= state_step.STATE_VALUES
