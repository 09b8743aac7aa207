"""Measures recall on names and values that training never saw: ``python -m pensieve.demo.training.evaluate``.

Forced (the default): whole dialogues in one forward pass each, counted strictly (``forced``). Live: scripted
conversations held turn by turn with the model's own answers as history, counted by whether the value is in the
answer. Both print a table and exit with 1 under the threshold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from pensieve.demo import MODEL_DIR
from pensieve.demo.talk.scenario import Conversation, conversations
from pensieve.demo.training.forced import RecallReport, score


class TransformersChat:
    """One conversation with a model of transformers, its cache kept between turns."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache: Any = None
        self.tokens: list[int] = []
        """The whole context so far."""

    @torch.no_grad()
    def read(self, tokens: list[int]) -> None:
        """Appends tokens to the context without answering."""
        if tokens:
            self._cache = self._model(
                torch.tensor([tokens]), past_key_values=self._cache, use_cache=True
            ).past_key_values
            self.tokens += tokens

    @torch.no_grad()
    def send(self, text: str, max_tokens: int = 64) -> str:
        """The greedy answer to one more turn of the user."""
        message = [{"role": "user", "content": text}]
        pending = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        end = self._tokenizer.eos_token_id
        answer: list[int] = []
        while len(answer) < max_tokens:
            out = self._model(torch.tensor([pending]), past_key_values=self._cache, use_cache=True)
            self._cache = out.past_key_values
            self.tokens += pending
            token = int(out.logits[0, -1].argmax())
            pending = [token]
            answer.append(token)
            if token == end:
                break
        self.read(pending)  # the last token is not in the cache yet
        text_out: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return text_out


def hold(chat: TransformersChat, conversation: Conversation, report: RecallReport, wrong: list[str]) -> None:
    """One scripted conversation; distances run from the turn that last held the value."""
    mentioned: dict[str, int] = {}
    for said in conversation:
        answer = chat.send(said.text)
        if said.expected is not None:
            right = said.expected.lower() in answer.lower()
            before = [place for text, place in mentioned.items() if said.expected in text]
            report.add(len(chat.tokens) - max(before), "live", right)
            if not right:
                wrong.append(f"{said.text} wanted {said.expected!r}, got {answer!r}")
        mentioned[said.text + "\n" + answer] = len(chat.tokens)


def table(title: str, rows: list[tuple[str, int, int]], console: Console) -> None:
    """Prints (name, asked, right) rows."""
    view = Table("", "questions", "right", "share", title=title)
    for name, asked, right in rows:
        view.add_row(name, str(asked), str(right), f"{right / asked:.2%}")
    console.print(view)


@click.command(context_settings={"show_default": True})
@click.option(
    "--model", "folder", type=click.Path(path_type=Path, exists=True), default=MODEL_DIR, help="Model folder."
)
@click.option("--length", default=4096, help="Tokens per dialogue (forced).")
@click.option("--dialogues", default=64, help="How many dialogues, or conversations with --live.")
@click.option("--turns", default=60, help="Turns per conversation (live).")
@click.option("--live", is_flag=True, help="Generate every answer instead of forcing the script's.")
@click.option("--seed", default="1", help="Which dialogues.")
@click.option("--threshold", default=0.99, help="Exit with 1 if a smaller share is right.")
@click.option("--show", default=0, help="Print this many wrong answers.")
def main(
    folder: Path, length: int, dialogues: int, turns: int, live: bool, seed: str, threshold: float, show: int
) -> None:
    """Measure recall on held-out names and values, by distance and by kind of value."""
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def best(ids: Tensor) -> Tensor:
        likely: Tensor = model(ids).logits.argmax(-1)
        return likely

    if live:
        report = RecallReport()
        wrong: list[str] = []
        for conversation in conversations(dialogues, turns, int(seed)):
            hold(TransformersChat(model, tokenizer), conversation, report, wrong)
        console.print("\n".join(wrong[:show]), markup=False)
    else:
        report = score(best, folder / "tokenizer.json", dialogues, length, f"evaluate {seed}", show)
    table("by distance in tokens", report.rows(), console)
    kinds = [(kind, asked, report.right_kind[kind]) for kind, asked in sorted(report.asked_kind.items())]
    table("by kind of value", kinds, console)
    console.print(f"recall {report.recall:.2%} of {report.questions} questions")
    sys.exit(0 if report.recall >= threshold else 1)


if __name__ == "__main__":
    main()
