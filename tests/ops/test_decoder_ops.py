"""The decoder's elementwise kernels without a GPU: refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pensieve.kernels import kv_write as kv_write_kernel
from pensieve.kernels.activation import activate
from pensieve.kernels.kv_write import kv_write
from pensieve.kernels.norm import add_norm, norm
from support.kernels.decoder_cases import HeadCase, head_case

CASE = head_case(5, norm=True)
PREP = CASE.prep
assert PREP.cos is not None


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (replace(CASE, qkv=CASE.qkv[:, :7]), "7 heads of 16 values do not fit"),
        (replace(CASE, qkv=CASE.qkv[..., :8]), "8 heads of 8 values do not fit"),
        (replace(CASE, pool=CASE.pool[:, :1]), "must be"),
        (replace(CASE, pool=CASE.pool.half()), "both must be"),
        (replace(CASE, pool=CASE.pool.double(), qkv=CASE.qkv.double()), "both must be"),
        (replace(CASE, slots=CASE.slots[:4]), r"slots are torch\.int64 \(4,\), not"),
        (replace(CASE, slots=CASE.slots.float()), r"slots are torch\.float32"),
        (replace(CASE, slots=CASE.slots.repeat(2)[::2]), "not contiguous"),
        (replace(CASE, prep=replace(PREP, sin=None)), "given together"),
        (replace(CASE, prep=replace(PREP, key_norm=None)), "given together"),
        (replace(CASE, prep=replace(PREP, cos=PREP.cos.repeat(1, 2))), r"cos is torch\.float32 \(5, 16\)"),
        (replace(CASE, prep=replace(PREP, cos=PREP.cos.half())), r"cos is torch\.float16"),
        (replace(CASE, prep=replace(PREP, key_norm=torch.ones(16).half())), r"key_norm is torch\.float16"),
        (replace(CASE, prep=replace(PREP, cos=PREP.cos.T.contiguous().T)), "contiguous"),
        (replace(CASE, qkv=CASE.qkv.mT.contiguous().mT), "contiguous"),
        (replace(CASE, slots=CASE.slots.to("meta")), "one device"),
    ],
)
def test_heads_that_do_not_fit_are_refused(case: HeadCase, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kv_write(case.pool, case.qkv, case.slots, case.prep)


def test_heads_too_large_or_odd_are_refused() -> None:
    for dim, says in ((258, "not supported"), (15, "do not fit")):
        with pytest.raises(ValueError, match=says):
            kv_write(torch.zeros(1, 2, 1, 4, dim), torch.zeros(1, 3, dim), CASE.slots[:1], replace(PREP))


@pytest.mark.parametrize("one_size", [True, False])
def test_a_fixed_head_norm_has_one_program_for_all_steps(
    one_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--invariant``: the size of a program decides the order of a head's sum."""
    launches: list[dict[str, Any]] = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **constants: launches.append(constants)

    monkeypatch.setattr(kv_write_kernel, "_prepare_and_store", Launches())
    monkeypatch.setattr(kv_write_kernel, "LARGE_STEP_VALUES", 4096)
    for tokens in (1, 7, 31, 32, 500):
        case = head_case(tokens, norm=True)
        kv_write(case.pool, case.qkv, case.slots, case.prep, one_size=one_size)
    assert len(launches) == 5
    assert all(one == launches[0] for one in launches) == one_size


def test_rows_that_do_not_fit_are_refused() -> None:
    x, weight = torch.zeros(3, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="not \\[T, W\\]"):
        norm(torch.zeros(2, 16385), torch.zeros(16385), None, 0.1)
    with pytest.raises(ValueError, match="must be float16"):
        norm(x.double(), weight.double(), None, 0.1)
    with pytest.raises(ValueError, match="weight is"):
        norm(x, weight[:7], None, 0.1)
    with pytest.raises(ValueError, match="weight is"):
        norm(x, weight.half(), None, 0.1)
    with pytest.raises(ValueError, match="bias is"):
        norm(x, weight, weight.half(), 0.1)
    with pytest.raises(ValueError, match="delta is"):
        add_norm(x, x[:2], weight, None, 0.1)
    with pytest.raises(ValueError, match="overlap"):
        add_norm(x[:1].expand(3, 8), x, weight, None, 0.1)
    with pytest.raises(ValueError, match="contiguous"):
        add_norm(x, x.T.contiguous().T, weight, None, 0.1)
    with pytest.raises(ValueError, match="one device"):
        norm(x, weight.to("meta"), None, 0.1)


def test_activations_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 \\* I"):
        activate(torch.zeros(2, 7), True, "silu")
    with pytest.raises(ValueError, match="must be float16"):
        activate(torch.zeros(2, 8).double(), True, "silu")
    with pytest.raises(ValueError, match="contiguous"):
        activate(torch.zeros(8, 2).T, True, "silu")
    with pytest.raises(ValueError, match="none of"):
        activate(torch.zeros(2, 8), True, "tanh")  # type: ignore[arg-type]
