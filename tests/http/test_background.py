"""Background responses outlive the engine that makes them, or say that they are lost."""

from __future__ import annotations

import asyncio
from typing import Any

from pensieve.errors import Unavailable
from support.http.http_rig import BearerTenant, HttpRig, door, opened
from support.service.service_rig import ANSWER, says, serving


async def respond(rig: HttpRig, **options: Any) -> Any:
    return await rig.client.responses.create(model="tiny", input="hi", background=True, **options)


async def ended(client: Any, response: Any) -> Any:
    async with asyncio.timeout(60):
        while (found := await client.responses.retrieve(response.id)).status == "in_progress":
            await asyncio.sleep(0.01)
    return found


async def test_one_without_a_listener_is_begun_again_with_the_same_seed() -> None:
    async with door(answer=None) as rig:
        link = rig.service.link
        begun = await respond(rig, temperature=1.0)
        async with asyncio.timeout(60):
            while not link.generations:
                await asyncio.sleep(0.005)
        (lost,) = link.generations
        link.answer = lambda _: says(ANSWER)
        lost.fail(Unavailable("the engine is gone", reason="ENGINE_FAILED"))
        found = await ended(rig.client, begun)
        assert (found.status, found.output_text) == ("completed", ANSWER)
        again = link.generations[-1]
        assert again is not lost and again.sampling.seed == lost.sampling.seed
        other = await ended(rig.client, await respond(rig, temperature=1.0))
        assert other.status == "completed" and link.generations[-1].sampling.seed != again.sampling.seed


async def test_one_that_went_with_its_server_has_failed_and_says_so() -> None:
    async with door(answer=None) as rig:
        begun = await respond(rig)
        store = rig.service.store
        async with (
            serving(answer=ANSWER, store=store, authorizer=BearerTenant()) as service,
            opened(service.target) as (_, client),
        ):
            await rig.service.conversations.turns.drain(0.0)
            found = await client.responses.retrieve(begun.id)
            assert found.status == "failed" and found.error is not None
            assert "send the request again" in found.error.message
