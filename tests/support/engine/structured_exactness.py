"""Random answers under grammars on a real worker, compared with transformers and a mask processor."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import Grammar, Sampling
from support.engine.choosing import EOS, PIECES, grammar, make_tokenizer
from support.engine.engine_driver import Clock, make_engine
from support.engine.exactness import LIMIT, Bench, with_groups
from support.engine.structured_rig import Answers, LateMatchers, make_structured

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"enum": ["red", "green"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = (grammar("start: %json " + json.dumps(SCHEMA)), grammar("start: /[a-z]{5,30}/"), None)


def verify(bench: Bench, context: Sequence[int], output: Sequence[int], followed: Grammar) -> None:
    """Raise AssertionError unless each token is the likeliest of those that the grammar allows."""
    rows = bench.oracle.logprobs([*context, *output[:-1]])[len(context) - 1 :]
    matcher = LLMatcher(make_tokenizer(bench.vocabulary), followed.text)
    mask = np.zeros(-(-bench.vocabulary // 32), np.int32)
    for row, token in zip(rows, output, strict=True):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(row)]
        allowed = row.masked_fill(torch.from_numpy(bits == 0), -torch.inf)
        assert float(allowed.max() - allowed[token]) < bench.near_tie
        assert matcher.consume_token(token)


def run_structured(bench: Bench, rng: random.Random) -> None:
    """Answers with and without grammars in the same steps, some suspended, some masks late; every one checked. Needs a
    checkpoint whose vocabulary has room for ``choosing.PIECES``."""
    tokenizer = make_tokenizer(bench.vocabulary)
    for overlapped in (False, True):
        cache = with_groups(bench, CacheConfig(device_chunks=20, host_chunks=6, chunk_tokens=8), rng)
        scheduler = SchedulerConfig(
            context_limit=LIMIT, eos_token_ids=(EOS,), max_batch_tokens=64, max_running=6
        )
        structured = make_structured(tokenizer, bench.vocabulary, rng)
        engine = make_engine(
            cache, scheduler, bench.worker(cache, scheduler), Clock(), bench.vocabulary,
            overlapped=overlapped, structured=structured,
        )  # fmt: skip
        answers, asked = Answers(engine), {}
        for request in range(1, 7):
            context = [rng.randrange(len(PIECES)) for _ in range(rng.randrange(1, 50))]
            followed = GRAMMARS[request % 3]
            asked[request] = context, followed
            answers.submit(request, context, Sampling(grammar=followed, max_output_tokens=30))
        answers.run()
        assert isinstance(structured.matchers, LateMatchers) and structured.matchers.lates
        for request, (context, followed) in asked.items():
            output = answers.outputs[request, 0]
            if followed is not None:
                verify(bench, context, output, followed)
            else:
                until = output.index(EOS) + 1 if EOS in output else len(output)
                bench.oracle.verify(context, output[:until])
        engine.close()
