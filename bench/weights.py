"""What forms of weights cost: time and memory of a load (``load``), and differences of logits (``error``). On a CPU.

python bench/weights.py load
python bench/weights.py error --model demo --model smollm2
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from common.provenance import commit, portable, table, write_report
from safetensors.torch import save_file

from pensieve import demo
from pensieve.config import WeightsName
from pensieve.kernels import reference
from pensieve.kernels.arguments import HeadPrep
from pensieve.model.arch import Arch
from pensieve.model.folder import has_fp8_products, load_arch
from pensieve.model.ops import TORCH_OPS
from pensieve.model.resolve import resolve_model
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights, weight_bytes
from pensieve.tokenizer.folder import read_folder

HIDDEN, INNER, LAYERS, VOCABULARY, EXPERTS = 2048, 6144, 3, 8192, 8
COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA = COMMON | {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True}
GPT_OSS = COMMON | {
    "model_type": "gpt_oss", "intermediate_size": HIDDEN, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "sliding_window": 128, "tie_word_embeddings": True, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 10000.0, "swiglu_limit": 7.0,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def _scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.rand(shape) * 0.01 + 0.001).to(dtype)


def _codes(out: int, inner: int) -> torch.Tensor:
    return torch.randn(out, inner).to(torch.float8_e4m3fn)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
SCHEMES: dict[str, tuple[dict[str, Any] | None, Any]] = {
    "bfloat16": (None, lambda o, i: {"weight": torch.randn(o, i).bfloat16()}),
    "FP8 by row (compressed-tensors)": (
        _compressed("float-quantized", _FLOAT | {"strategy": "channel"}, _FLOAT | {"strategy": "token"}),
        lambda o, i: {"weight": _codes(o, i), "weight_scale": _scales(o, 1)},
    ),
    "FP8 by 128 x 128 (fp8)": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda o, i: {
            "weight": _codes(o, i), "weight_scale_inv": _scales(o // 128, i // 128, dtype=torch.float32)
        },
    ),
    "int8 by row (compressed-tensors)": (
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        lambda o, i: {
            "weight": torch.randint(-127, 128, (o, i), dtype=torch.int8), "weight_scale": _scales(o, 1)
        },
    ),
    "4 bits by 128 (compressed-tensors)": (
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
        lambda o, i: {
            "weight_packed": _words(o, i // 8), "weight_scale": _scales(o, i // 128),
            "weight_shape": torch.tensor([o, i]),
        },
    ),
    "4 bits by 128 (AWQ)": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        lambda o, i: {
            "qweight": _words(i, o // 8), "qzeros": _words(i // 128, o // 8),
            "scales": _scales(i // 128, o, dtype=torch.float16),
        },
    ),
    "4 bits by 128 (GPTQ)": (
        _GPTQ,
        lambda o, i: {
            "qweight": _words(i // 8, o), "qzeros": _words(i // 128, o // 8),
            "scales": _scales(i // 128, o, dtype=torch.float16), "g_idx": (torch.arange(i) // 128).int(),
        },
    ),
    "MXFP4 experts (gpt-oss)": ({"quant_method": "mxfp4"}, None),
}  # fmt: skip
"""``quantization_config``, and the tensors of a matrix [out, in] with random values."""


def _tensors(pack: Any) -> Tensors:
    """The tensors of a checkpoint."""
    layers = LAYERS if pack else int(GPT_OSS["num_hidden_layers"])
    made = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        made |= {
            f"{at}{name}.weight": torch.ones(HIDDEN)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        attention = {"q": (2048, HIDDEN), "k": (512, HIDDEN), "v": (512, HIDDEN), "o": (HIDDEN, 2048)}
        matrices = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
        if pack is not None:
            matrices |= {
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }
        else:
            made |= {f"{at}{name}.bias": torch.zeros(shape[0]).bfloat16() for name, shape in matrices.items()}
            made |= _mxfp4(f"{at}mlp.")
            made[f"{at}self_attn.sinks"] = torch.zeros(16).bfloat16()
        packed = pack or SCHEMES["bfloat16"][1]
        for name, shape in matrices.items():
            made |= {f"{at}{name}.{last}": part for last, part in packed(*shape).items()}
    return {name: tensor.contiguous() for name, tensor in made.items()}


def _mxfp4(at: str) -> Tensors:
    made: Tensors = {
        f"{at}router.weight": torch.randn(EXPERTS, HIDDEN).bfloat16(),
        f"{at}router.bias": torch.zeros(EXPERTS).bfloat16(),
    }
    for name, out in (("gate_up_proj", 2 * HIDDEN), ("down_proj", HIDDEN)):
        blocks = (EXPERTS, out, HIDDEN // 32, 16)
        made |= {
            f"{at}experts.{name}_blocks": torch.randint(0, 256, blocks, dtype=torch.uint8),
            f"{at}experts.{name}_scales": torch.randint(118, 126, blocks[:3], dtype=torch.uint8),
            f"{at}experts.{name}_bias": torch.zeros(EXPERTS, out).bfloat16(),
        }
    return made


def _anonymous_mb() -> float:
    """Memory of this process that no file backs."""
    found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1e3


def _measure(folder: Path, weights: WeightsName) -> dict[str, Any]:
    """Load once in this process, as bfloat16; pages of the file are in the system's cache."""
    torch.set_num_threads(1)
    arch, before, most, done = load_arch(folder), _anonymous_mb(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    made = load_weights(folder, arch, dtype=torch.bfloat16, weights=weights)
    wall, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    done.set()
    watcher.join()
    file = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
    held, peak = weight_bytes(made) / 1e6, max(most[0], _anonymous_mb()) - before
    processor = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {
        "file MB": round(file), "weights MB": round(held), "peak MB": round(peak),
        "more than weights MB": round(peak - held), "s": round(wall, 2),
        "processor s": round(processor, 2), "weights MB/s": round(held / processor),
    }  # fmt: skip


@click.group()
def main() -> None:
    """Measure forms of weights on a CPU."""


@main.command("load")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench/results"))
@click.option("--only", default="", help="Schemes whose name contains this.")
def load_command(out: Path, only: str) -> None:
    """Load a random checkpoint of each scheme in a process of its own; write weights_load.md."""
    rows = []
    for name, (config, pack) in SCHEMES.items():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            shape = LLAMA if pack is not None else GPT_OSS
            given = {} if config is None else {"quantization_config": config}
            (folder / "config.json").write_text(json.dumps(shape | given))
            save_file(_tensors(pack), folder / "model.safetensors", {"format": "pt"})
            forms: list[WeightsName] = ["full", "fp8"] if config is None else ["full"]
            for weights in [*forms, *(["auto"] if has_fp8_products(folder, "auto") else [])]:
                command = [sys.executable, "-P", __file__, "one", str(folder), weights]
                done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
                rows.append({"folder": name, "--weights": weights, **json.loads(done.stdout)})
                click.echo(rows[-1], err=True)
    _write(out, "weights_load", rows)


@main.command("one", hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("weights")
def one_command(folder: Path, weights: WeightsName) -> None:
    """Print the figures of one load."""
    click.echo(json.dumps(_measure(folder, weights)))


class Causal:
    """``Attend`` of one whole context."""

    def __init__(self, arch: Arch, tokens: int) -> None:
        self.arch, self.slots = arch, torch.arange(tokens)

    def __call__(self, layer: int, qkv: torch.Tensor, prep: HeadPrep) -> torch.Tensor:
        pool = qkv.new_zeros(1, 2, self.arch.num_kv_heads, len(self.slots), self.arch.head_dim)
        q = reference.kv_write(pool, qkv, self.slots, prep)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], pool[:, 0], pool[:, 1], is_causal=True, scale=self.arch.attention_scale,
            enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1)


def _texts() -> str:
    """The demo's conversations."""

    def strings(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for one in value.values() if isinstance(value, dict) else value:
                yield from strings(one)

    conversations = Path(demo.__file__).parent / "conversations.json"
    return "\n".join(strings(json.loads(conversations.read_text(encoding="utf-8"))))


@main.command("error")
@click.option("--model", "models", multiple=True, default=("demo",))
@click.option("--windows", default=2, help="Contexts of each model.")
@click.option("--tokens", default=256, help="Tokens of a context.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench/results"))
@torch.no_grad()
def error_command(models: tuple[str, ...], windows: int, tokens: int, out: Path) -> None:
    """Compare logits and the likeliest tokens with those in bfloat16; write weights_error.md."""
    torch.set_num_threads(1)
    rows = []
    for model in models:
        folder = resolve_model(model)
        arch, ids = load_arch(folder), read_folder(folder).backend.encode(_texts()).ids
        found: dict[str, list[torch.Tensor]] = {}
        ways: list[tuple[str, torch.dtype, WeightsName]] = [
            ("bfloat16", torch.bfloat16, "full"), ("float32", torch.float32, "full"),
            ("fp8 weights, bfloat16", torch.bfloat16, "fp8"), ("fp8 weights, float32", torch.float32, "fp8"),
        ]  # fmt: skip
        contexts = [torch.tensor(ids[start * tokens : (start + 1) * tokens]) for start in range(windows)]
        for name, dtype, weights in ways:
            decoder = Transformer(arch, load_weights(folder, arch, dtype=dtype, weights=weights), TORCH_OPS)
            found[name] = [
                decoder.forward(one, torch.arange(tokens), Causal(arch, tokens), torch.arange(tokens))
                for one in contexts
            ]
        plain = torch.cat(found["bfloat16"])
        for name, logits in found.items():
            every = torch.cat(logits)
            loss = torch.stack(
                [F.cross_entropy(one[:-1], ids_[1:]) for one, ids_ in zip(logits, contexts, strict=True)]
            )
            rows.append({
                "model": model, "computed in": name,
                "rms difference ÷ spread": f"{float((every - plain).std() / plain.std()):.1e}",
                "likeliest token differs": f"{int((every.argmax(1) != plain.argmax(1)).sum())} of {len(every)}",
                "nats per token": round(float(loss.mean()), 4),
            })  # fmt: skip
            click.echo(rows[-1], err=True)
    _write(out, "weights_error", rows)


def _write(out: Path, name: str, rows: list[dict[str, Any]]) -> None:
    command = portable(["python", *sys.argv])
    lines = [
        f"`{command}`",
        "",
        f"Commit {commit()}, torch {torch.__version__}, one thread of a shared CPU.",
        "",
        *table(rows),
    ]
    write_report(out, name, {"command": command, "commit": commit(), "rows": rows}, lines)
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
