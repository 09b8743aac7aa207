"""Trains the demo model from nothing: ``python -m pensieve.demo.training.train --seconds 450 --out FOLDER``.

Rows grow from short to long: recall is learned within a few turns first and then stretched over the context. The
learning rate follows the clock instead of a step count, so a run ends well whatever the machine does per second.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from pensieve.demo.training import tokenizer as demo_tokenizer
from pensieve.demo.training.decoder import Decoder, DecoderSizes, load_weights, rotary, save
from pensieve.demo.training.feed import Feed
from pensieve.demo.training.forced import RecallReport, score


@dataclass(frozen=True, slots=True)
class LengthPhase:
    """A stretch of training at one row length; ``until`` is the share of the time at which it ends."""

    length: int
    until: float


PHASES: tuple[LengthPhase, ...] = (
    LengthPhase(256, 0.12),
    LengthPhase(1024, 0.40),
    LengthPhase(4096, 0.72),
    LengthPhase(8192, 1.0),
)


def loss_of(model: Decoder, ids: Tensor, weights: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Weighted mean of the next-token losses."""
    hidden = model(ids[:, :-1], cos, sin)
    logits = model.logits(hidden).float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    wanted = weights[:, 1:].flatten()
    return (losses * wanted).sum() / wanted.sum()


def rate_at(share: float, peak: float) -> float:
    """Learning rate at a share of the run: a short warm-up, flat, then down to nothing over the second half."""
    return peak * min(1.0, share / 0.03, (1.0 - share) / 0.5 + 0.01)


def optimizer_for(model: Decoder, peak: float, fused: bool) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=fused)


def train(
    model: Decoder,
    feed: Feed,
    seconds: float,
    tokens: int,
    peak: float,
    phases: tuple[LengthPhase, ...],
    compiled: bool,
    tokenizer: Path,
) -> None:
    """Trains in place for this many seconds."""
    device = model.embed_tokens.weight.device
    optimizer = optimizer_for(model, peak, fused=device.type == "cuda")
    step_loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    started = time.monotonic()
    steps = seen = 0
    for phase in phases:
        cos, sin = rotary(model.sizes, phase.length, device)
        batches = feed.batches(phase.length + 1, max(1, tokens // phase.length), device)
        shown = time.monotonic()
        for ids, weights in batches:
            share = (time.monotonic() - started) / seconds
            if share >= phase.until:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate_at(share, peak)
            with torch.autocast(device.type, torch.bfloat16):
                loss = step_loss(model, ids, weights, cos, sin)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
            seen += ids.numel()
            if steps % 10 == 0 and time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(
                    f"{shown - started:6.1f} s  step {steps:6d}  length {phase.length:5d}  {seen / 1e6:8.1f} M tokens"
                    f"  loss {loss.item():.4f}",
                    flush=True,
                )
        batches.close()
        if device.type == "cuda":
            report = check(
                model, tokenizer, rows=max(8, 65536 // phase.length), length=phase.length, seed="check"
            )
            print(report.line(), flush=True)


@torch.no_grad()
def check(model: Decoder, tokenizer: Path, rows: int, length: int, seed: str, show: int = 0) -> RecallReport:
    """Recall on held-out dialogues of this length."""
    device = model.embed_tokens.weight.device
    cos, sin = rotary(model.sizes, length, device)

    def best(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model.logits(model(ids.to(device), cos, sin)).argmax(-1).cpu()

    return score(best, tokenizer, rows, length, seed, show)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the model to.")
@click.option("--seconds", default=450.0, show_default=True, help="Training time.")
@click.option("--tokens", default=131072, show_default=True, help="Tokens per step.")
@click.option("--rate", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option(
    "--workers",
    default=max(1, (os.cpu_count() or 2) - 2),
    show_default=True,
    help="Processes that write dialogues.",
)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--resume", type=click.Path(path_type=Path, exists=True), help="Start from the weights of this folder."
)
@click.option("--phases", default="", help='Lengths and end shares, e.g. "1024:0.3,4096:1.0".')
@click.option("--compile/--no-compile", "compiled", default=torch.cuda.is_available())
def main(
    out: Path,
    seconds: float,
    tokens: int,
    rate: float,
    workers: int,
    seed: int,
    resume: Path | None,
    phases: str,
    compiled: bool,
) -> None:
    """Trains the demo model and writes a LlamaForCausalLM folder."""
    plan = PHASES
    if phases:
        pairs = (item.split(":") for item in phases.split(","))
        plan = tuple(LengthPhase(int(length), float(until)) for length, until in pairs)
    sizes = DecoderSizes()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_file = out / "tokenizer.json"
    if not tokenizer_file.exists():
        demo_tokenizer.save(demo_tokenizer.build(), out, sizes.context)
    feed = Feed(tokenizer_file, f"train {seed}", plan[0].length + 1, workers)  # before CUDA starts: it forks
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder(sizes).to(device)
    if resume is not None:
        load_weights(model, resume)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    try:
        train(model, feed, seconds, tokens, rate, plan, compiled, tokenizer_file)
    finally:
        feed.close()
    if device.type == "cuda":
        for length in (4096, 8192):
            print(
                check(model, tokenizer_file, rows=64, length=length, seed="final", show=16).line(), flush=True
            )
    vocab = json.loads(tokenizer_file.read_text())
    ids = {token["content"]: token["id"] for token in vocab["added_tokens"]}
    save(model, out, ids[demo_tokenizer.END], ids[demo_tokenizer.PAD])


if __name__ == "__main__":
    main()
