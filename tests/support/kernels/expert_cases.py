"""Random mixtures of experts, transformers' own modules with the same weights, and checks of the products' kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from pensieve.kernels import expert_reference
from pensieve.kernels.expert_rows import combine_rows, group_rows, pick_experts
from pensieve.kernels.grouped_product import clamped_glu, grouped_product
from pensieve.model.arch import Experts
from pensieve.model.weights import ExpertWeights, GroupedLinear, Linear, MlpWeights

Kind = Literal["gpt_oss", "qwen3_moe", "qwen3_moe plain", "mixtral", "qwen3_next"]
KINDS: tuple[Kind, ...] = ("gpt_oss", "qwen3_moe", "qwen3_moe plain", "mixtral", "qwen3_next")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""What a product may differ from float64 as a whole: the norm of its error over its norm."""


def description(kind: Kind, count: int, per_token: int, width: int) -> Experts:
    sizes = {"count": count, "per_token": per_token, "width": width}
    if kind == "gpt_oss":
        return Experts(**sizes, softmax="picked", bias=True, clamped=(1.702, 1.5))
    if kind == "mixtral":
        return Experts(**sizes, softmax="all", renormalised=True, weights_rounded=False)
    shared = width + 4 if kind == "qwen3_next" else 0
    return Experts(**sizes, softmax="all", renormalised=kind != "qwen3_moe plain", shared_width=shared)


def random_experts(
    experts: Experts, hidden: int, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> ExpertWeights:
    """Weights whose router tells its experts well apart; stored as the checkpoints of the two kinds store them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, inputs: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * inputs**-0.5).to(device, dtype)

    count, width, inner = experts.count, experts.width, 2 * experts.width
    if experts.clamped is not None:
        up, down = normal(count, hidden, inner, inputs=hidden) * 2, normal(count, width, hidden, inputs=width)
    else:
        up = normal(count, inner, hidden, inputs=hidden).transpose(1, 2)
        down = normal(count, hidden, width, inputs=width).transpose(1, 2)
    given, shared = experts.bias, experts.shared_width
    return ExpertWeights(
        Linear(normal(count, hidden, inputs=hidden) * 3, normal(count, inputs=1) if given else None),
        GroupedLinear(up, normal(count, inner, inputs=4) if given else None),
        GroupedLinear(down, normal(count, hidden, inputs=4) if given else None),
        MlpWeights(
            Linear(normal(2 * shared, hidden, inputs=hidden), None),
            Linear(normal(hidden, shared, inputs=shared), None),
        )
        if shared
        else None,
        Linear(normal(1, hidden, inputs=hidden) * 3, None) if shared else None,
    )


def cast(weights: Any, to: torch.dtype | str) -> Any:
    """Return the weights in another dtype or on another device, with their strides."""
    if isinstance(weights, torch.Tensor):
        return weights.to(to)
    if not is_dataclass(weights):
        return weights
    return type(weights)(*(cast(getattr(weights, field.name), to) for field in fields(weights)))


def module_of(kind: Kind, experts: Experts, hidden: int, weights: ExpertWeights) -> torch.nn.Module:
    """Return transformers' module with these weights."""
    width, count = experts.width, experts.count
    sizes = {"hidden_size": hidden, "num_experts_per_tok": experts.per_token, "num_hidden_layers": 1}
    module: torch.nn.Module
    router, up, down = weights.router, weights.up, weights.down
    state = {"experts.gate_up_proj": up.weight.transpose(1, 2), "gate.weight": router.weight}
    state["experts.down_proj"] = down.weight.transpose(1, 2)
    if kind == "gpt_oss":
        assert experts.clamped is not None
        alpha, limit = experts.clamped
        config: Any = GptOssConfig(
            **sizes, num_local_experts=count, intermediate_size=width, swiglu_alpha=alpha, swiglu_limit=limit
        )
        module = GptOssMLP(config)
        given = {"router.weight": router.weight, "router.bias": router.bias}
        given |= {"experts.gate_up_proj": up.weight, "experts.gate_up_proj_bias": up.bias}
        given |= {"experts.down_proj": down.weight, "experts.down_proj_bias": down.bias}
        state = {name: value for name, value in given.items() if value is not None}
    elif kind == "mixtral":
        config = MixtralConfig(**sizes, num_local_experts=count, intermediate_size=width)
        module = MixtralSparseMoeBlock(config)
    elif kind == "qwen3_next":
        sizes |= {"num_experts": count, "moe_intermediate_size": width}
        config = Qwen3NextConfig(**sizes, shared_expert_intermediate_size=experts.shared_width)
        module = Qwen3NextSparseMoeBlock(config)
        assert weights.shared is not None and weights.shared_gate is not None
        gate, value = weights.shared.up.weight.chunk(2)
        state |= {"shared_expert.gate_proj.weight": gate, "shared_expert.up_proj.weight": value}
        state |= {"shared_expert.down_proj.weight": weights.shared.down.weight}
        state |= {"shared_expert_gate.weight": weights.shared_gate.weight}
    else:
        sizes |= {"num_experts": count, "moe_intermediate_size": width}
        config = Qwen3MoeConfig(**sizes, norm_topk_prob=experts.renormalised)
        module = Qwen3MoeSparseMoeBlock(config)
    config._experts_implementation = "eager"
    module.to(router.weight.dtype).eval().load_state_dict(state)
    return module


def expected(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the result of transformers' module for ``x`` [T, H]."""
    with torch.no_grad():
        got = module(x[None])
    found: torch.Tensor = got[0] if isinstance(got, tuple) else got
    return found.view(x.shape)


@dataclass(frozen=True, slots=True)
class ProductCase:
    """Arguments of ``grouped_product``."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    ends: torch.Tensor
    read: torch.Tensor | None
    write: torch.Tensor | None


def product_case(
    counts: list[int],
    inputs: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    bias: bool = True,
    read: bool = True,
    write: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> ProductCase:
    """Random arguments with ``counts`` rows per expert; ``x`` lies inside a wider tensor."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    rows, experts = sum(counts), len(counts)
    tokens = max(1, rows // 2) if read else rows
    weight = (
        normal(experts, columns, inputs).transpose(1, 2) if transposed else normal(experts, inputs, columns)
    )
    return ProductCase(
        normal(tokens, inputs + 16)[:, :inputs],
        weight,
        normal(experts, columns) if bias else None,
        torch.tensor(counts, device=device).cumsum(0).int(),
        torch.randint(0, tokens, (rows,), generator=generator, device=device) if read else None,
        torch.randperm(rows, generator=generator, device=device) if write else None,
    )


def check_product(case: ProductCase) -> None:
    """The kernel against the reference in float64, which does not round between product and bias."""
    got = grouped_product(case.x, case.weight, case.bias, case.ends, read=case.read, write=case.write)
    wide = [None if one is None else one.double() for one in (case.x, case.weight, case.bias)]
    assert wide[0] is not None and wide[1] is not None
    want = expert_reference.grouped_product(
        wide[0], wide[1], wide[2], case.ends, read=case.read, write=case.write
    )
    assert got.shape == want.shape and got.dtype == case.x.dtype
    error = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
    assert error <= TOLERANCE[got.dtype], error


def check_glu(rows: int, inner: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """The kernel against the reference in its own dtype: the two round alike, up to the last bit of an exponential."""
    generator = torch.Generator(device).manual_seed(inner)
    up = (torch.randn(rows, 2 * inner + 16, generator=generator, device=device) * 4).to(dtype)[:, : 2 * inner]
    got, want = clamped_glu(up, 1.702, 7.0), expert_reference.clamped_glu(up, 1.702, 7.0)
    assert got.shape == want.shape == (rows, inner) and got.dtype == dtype
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    assert error <= {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype], error


def check_picks(
    tokens: int, experts: int, per_token: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> None:
    """The same experts with the same weights as the reference's; no two logits of a token are equal."""
    generator = torch.Generator(device).manual_seed(experts)
    order = torch.rand(tokens, experts, generator=generator, device=device).argsort(dim=-1)
    # Up to 512 values that bfloat16 tells apart, in rows inside a wider tensor.
    logits = torch.nn.functional.pad((order - experts // 2) / 32, (0, 4), value=99.0).to(dtype)[:, :experts]
    for first, renormalised, rounded in ((False, False, True), (True, False, True), (True, True, False)):
        how = {"softmax_first": first, "renormalised": renormalised, "rounded": rounded}
        weights, picked = pick_experts(logits, per_token, **how)
        want, want_picked = expert_reference.pick_experts(logits, per_token, **how)
        assert torch.equal(picked, want_picked) and picked.dtype == want_picked.dtype
        assert weights.dtype == want.dtype
        torch.testing.assert_close(weights, want, rtol=2e-6 if want.dtype == torch.float32 else 8e-3, atol=0)


def check_groups(tokens: int, experts: int, per_token: int, *, used: int = 0, device: str = "cpu") -> None:
    """The order of rows equals the reference's; only the first ``used`` experts have rows, unless it is 0."""
    generator = torch.Generator(device).manual_seed(tokens)
    shares = torch.rand(tokens, used or experts, generator=generator, device=device)
    picked = shares.argsort(dim=-1)[:, :per_token].int().contiguous()
    got, want = group_rows(picked, experts), expert_reference.group_rows(picked, experts)
    assert all(
        torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(got, want, strict=True)
    )


def check_sums(
    tokens: int,
    per_token: int,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    exact_weights: bool = False,
    device: str = "cpu",
) -> None:
    """Sums of a token's rows against the reference in the same dtype."""
    generator = torch.Generator(device).manual_seed(width)
    x = torch.randn(tokens * per_token, width + 8, generator=generator, device=device).to(dtype)[:, :width]
    weights = torch.rand(tokens, per_token, generator=generator, device=device)
    weights = weights if exact_weights else weights.to(dtype)
    got, want = combine_rows(x, weights), expert_reference.combine_rows(x.contiguous(), weights)
    assert got.dtype == dtype and got.shape == (tokens, width)
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    assert error <= {torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 2e-3}[dtype], error
