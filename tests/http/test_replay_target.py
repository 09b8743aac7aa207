"""``pensieve replay`` against the door, with the history at the server."""

from __future__ import annotations

import numpy as np

from pensieve.replay.targets.base import TurnRequest
from pensieve.replay.targets.openai_target import OpenAITarget
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import door
from support.service.service_rig import ANSWER, encode


async def test_only_the_new_turn_travels() -> None:
    async with door() as rig:
        target = OpenAITarget(f"{rig.url}/v1/responses", api_key="acme")
        try:
            info = await target.open()
            assert info.details["api"] == "responses"
            session = await target.start_session()
            contexts = []
            for length in (3, 5, 4):
                said: list[int] = []
                spec = TurnRequest(np.arange(length, dtype=np.int32), 50, False)
                usage = await target.turn(session, spec, lambda count, _, said=said: said.append(count))  # type: ignore[misc]
                assert usage is not None and usage.reconciles
                assert sum(said) == usage.output_tokens >= len(encode(ANSWER))
                contexts.append(usage.context_tokens)
            assert contexts[0] < contexts[1] < contexts[2]
            assert (info.context_limit, info.vocab_size > 0) == (256, True)
        finally:
            await target.close()
        sessions = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert len(sessions) == 2, "one of the question what the server takes, one of all turns"
