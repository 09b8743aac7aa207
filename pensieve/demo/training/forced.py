"""Forced evaluation: a whole dialogue in one forward pass; an answer is right when all its tokens have the top logit.

That is exactly "greedy decoding would have written this answer": every earlier token of a right answer is given as
greedy decoding would have made it. The assistant's earlier turns are the script's. Names and values are held out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pensieve.demo.training.packing import Packer

EDGES = (64, 128, 256, 512, 1024, 2048, 3072, 4096, 8192)
"""Upper ends of the distance buckets, in tokens."""
NEVER = "never told"


def bucket_of(distance: int) -> str:
    """The distance bucket's name; ``NEVER`` for a question whose answer was never told (-1)."""
    return NEVER if distance < 0 else f"<= {next(edge for edge in EDGES if distance <= edge)}"


@dataclass
class RecallReport:
    """Counts of questions and right answers, by distance bucket and by kind of value."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    right_kind: Counter[str] = field(default_factory=Counter)
    asked_kind: Counter[str] = field(default_factory=Counter)

    def add(self, distance: int, kind: str, correct: bool) -> None:
        """Counts one answer."""
        self.asked[bucket_of(distance)] += 1
        self.right[bucket_of(distance)] += correct
        self.asked_kind[kind] += 1
        self.right_kind[kind] += correct

    @property
    def questions(self) -> int:
        """Questions whose answer was told."""
        return self.asked.total() - self.asked[NEVER]

    @property
    def recall(self) -> float:
        """Share of right answers among questions whose answer was told."""
        return (self.right.total() - self.right[NEVER]) / max(1, self.questions)

    def rows(self) -> list[tuple[str, int, int]]:
        """(bucket, asked, right), nearest first."""
        names = [*(f"<= {edge}" for edge in EDGES), NEVER]
        return [(name, self.asked[name], self.right[name]) for name in names if self.asked[name]]

    def line(self) -> str:
        """Everything by distance on one line."""
        parts = [f"{name}: {right / asked:.4f} ({asked})" for name, asked, right in self.rows()]
        return f"recall {self.recall:.4f} | " + ", ".join(parts)


def score(
    best: Callable[[Tensor], Tensor], tokenizer: Path, rows: int, length: int, seed: str, show: int = 0
) -> RecallReport:
    """Counts over this many held-out dialogues; prints the first ``show`` wrong answers.

    ``best`` maps ids [1, length] to the most likely next token at each place [1, length].
    """
    packer = Packer(tokenizer, seed, held_out=True)
    report = RecallReport()
    for _ in range(rows):
        row = packer.row(length)
        ids = torch.from_numpy(row.ids.astype("int64"))
        likely = best(ids[None])[0]
        good = likely[:-1] == ids[1:]
        for question in row.questions:
            correct = bool(good[question.start - 1 : question.stop - 1].all())
            report.add(question.distance, question.kind, correct)
            if not correct and show > 0:
                show -= 1
                packer.show(row, question, likely.numpy())
    return report
