"""Begins the turns of a completion: each prompt is a session of its own, which is erased after a while.

Not at once: until then the same prompt finds its state cached, and a call that is sent again its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from pensieve.client import AsyncTurnStream, RawText, Role, TurnOptions
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.http.common.callers import Caller
from pensieve.http.common.calls import Call, CallPlan, new_session
from pensieve.http.common.failures import failure_of
from pensieve.http.common.requests import seed_of
from pensieve.http.completions.requests import AskedCompletion, Prompt

_OF_PROMPTS: Final = ("initial_items", "turn.input")
"""How the paths of fields begin that a prompt went into."""


@dataclass(frozen=True, slots=True)
class BegunPrompt:
    """A prompt and its turn, which the service has accepted."""

    stream: AsyncTurnStream
    text: str
    """Of the prompt; empty for token ids, unless it is to be echoed."""
    token_ids: tuple[int, ...]
    """Of the prompt; empty unless they are wanted."""


async def begin_all(
    caller: Caller,
    asked: AskedCompletion,
    call: Call,
    ttl_s: float,
    held: AsyncExitStack,
) -> list[BegunPrompt]:
    """One turn for each prompt, all accepted; ``held`` closes them. Raises what the first refused one does, and leaves
    nothing behind then."""
    plan = await call.settled(caller.client, CallPlan(new_session("text-")))
    turns = {
        _session(plan, number): uuid.uuid5(call.id, f"prompt {number}")
        for number in range(len(asked.prompts))
    }
    async with call.leaving_nothing(caller.client, plan, turns):
        begun = [
            _begin(caller, asked, prompt, name, turn_id, ttl_s, held)
            for prompt, (name, turn_id) in zip(asked.prompts, turns.items(), strict=True)
        ]
        # All have ended before an error is told: what begins later would not be closed.
        outcomes = await asyncio.gather(*begun, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await _end(outcomes)
                raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, BegunPrompt)]


async def _end(outcomes: Sequence[BegunPrompt | BaseException]) -> None:
    """The turns beside one that was refused."""
    for one in outcomes:
        if isinstance(one, BegunPrompt):
            with contextlib.suppress(PensieveError):
                await one.stream.cancel(keep="nothing")


def _session(plan: CallPlan, number: int) -> str:
    """Name of the session of one prompt."""
    return (
        f"text-{uuid.uuid5(uuid.UUID(plan.own.removeprefix('text-')), str(number)).hex}"
        if number
        else plan.own
    )


async def _begin(
    caller: Caller,
    asked: AskedCompletion,
    prompt: Prompt,
    name: str,
    turn_id: uuid.UUID,
    ttl_s: float,
    held: AsyncExitStack,
) -> BegunPrompt:
    try:
        session = await caller.client.create_session(
            session_id=name,
            initial_items=[(Role.USER, prompt)],
            ttl=ttl_s,
            request_id=str(uuid.uuid5(turn_id, "session")),
        )
        text, ids = (prompt, ()) if isinstance(prompt, RawText) else ("", tuple(prompt))
        if (asked.body.echo and not text) or (asked.body.return_token_ids and not ids):
            item = (await session.items(include_tokens=True))[0]
            text, ids = item.text, item.token_ids
        # The prompt is there already: the turn answers it.
        options: TurnOptions = {
            "seed": seed_of(turn_id),
            **asked.options,
            "replace_after_item": 1,
            "request_id": str(turn_id),
        }
        stream = session.stream(**options)
        held.callback(stream.close)
        await stream.accepted()
    except InvalidArgument as error:
        failure = failure_of(error)
        if error.violations and error.violations[0][0].startswith(_OF_PROMPTS):
            failure.param = "prompt"
        raise failure from error
    return BegunPrompt(stream, text, ids)
