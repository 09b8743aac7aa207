"""EraseSubject and a real engine: the receipt says what lay in the tiers, and nothing of it stays there."""

from __future__ import annotations

from pathlib import Path

from pensieve.v1 import pensieve_pb2 as pb
from support.engine.checkpoints import tiny_checkpoint
from support.service.real_engine import VOCAB, TinyModel, really_serving
from support.service.service_rig import Rig, spec, uid
from support.tokenizers_ import CHATML, byte_level, write_folder


async def cached(rig: Rig, name: str) -> tuple[int, int]:
    answer = await rig.api.GetSession(pb.GetSessionRequest(name=name, view=pb.SESSION_VIEW_FULL))
    return answer.session.residency.gpu_tokens, answer.session.residency.host_tokens


async def test_the_tiers_keep_nothing_that_no_other_session_shares(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama3", tmp_path, vocab_size=VOCAB)
    write_folder(folder, byte_level(), CHATML, bos=None, eos="<|im_end|>")
    async with really_serving(TinyModel(folder)) as rig:
        short = pb.SamplingParams(max_output_tokens=4)
        hers = await rig.create(config=pb.SessionConfig(subject="ada", default_sampling=short))
        await rig.run(hers, spec("a question that fills several chunks of the device " * 2))
        fork = await rig.api.ForkSession(pb.ForkSessionRequest(name=hers, request_id=uid()))
        await rig.run(fork.session.name, "on")
        before = {name: await cached(rig, name) for name in (hers, fork.session.name)}
        assert all(device > 50 for device, _ in before.values())
        events = [one async for one in rig.api.EraseSubject(pb.EraseSubjectRequest(subject="ada"))]
        erased = [one.session for one in events[:-1]]
        assert {one.name: (one.device_tokens, one.host_tokens) for one in erased} == before
        # The fork shares the beginning: it goes with the last of the two.
        assert sum(one.dropped_tokens for one in erased) > 0
        stats = await rig.admin.GetStats(pb.GetStatsRequest())
        assert (stats.gpu_tokens_used, stats.host_tokens_used) == (0, 0)
