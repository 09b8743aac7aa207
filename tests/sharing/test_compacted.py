"""CompactSession and a real engine: the summary is made on the cached prefix, also when the engine dies meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve import AsyncClient
from pensieve.core import SamplingOptions
from support.engine.checkpoints import tiny_checkpoint
from support.service.real_engine import VOCAB, TinyModel, really_serving
from support.tokenizers_ import CHATML, byte_level, write_folder

SHORT = SamplingOptions(max_output_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("dies_after", [None, 14, 18, 24])
async def test_the_summary_reads_the_sessions_cache(tmp_path: Path, dies_after: int | None) -> None:
    """``dies_after``: steps of the engine; the two turns before take 12, the summary 8."""
    folder = tiny_checkpoint("llama3", tmp_path, vocab_size=VOCAB)
    write_folder(folder, byte_level(), CHATML, bos=None, eos="<|im_end|>")
    model = TinyModel(folder)
    async with really_serving(model, dies_after=dies_after) as rig, AsyncClient(rig.target) as client:
        chat = await client.create_session(**SHORT)
        for text in ("a question that fills chunks of the device ", "another one "):
            await chat.send(text * 3)
        before = await chat.items(include_tokens=True)
        done = await chat.compact(keep_turns=1, max_summary_tokens=8)
        after = await chat.items(include_tokens=True)
        assert [item.text for item in after[1:]] == [item.text for item in before[2:]]
        assert (await client.session(done.branch).items(include_tokens=True))[: len(before)] == before
        if dies_after is None:
            assert done.usage is not None
            # Only the last, incomplete chunk of 8 tokens is computed again.
            assert done.usage.gpu_cached_tokens > sum(len(item.token_ids) for item in before) - 16
            assert done.usage.recomputed_tokens < 8
        assert (await chat.send("on")).usage.context_tokens > sum(len(item.token_ids) for item in after)
