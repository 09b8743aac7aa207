"""Many leases are renewed in one round trip to each server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from pensieve.errors import NotFound, PensieveError, Unavailable
from pensieve.store._redis.link import RedisLink, RedisScript
from pensieve.store._redis.problems import refusal
from pensieve.store._redis.rows import parse_order, session_keys
from pensieve.store._redis.several import all_ended
from pensieve.store.contract import HeldLease, RenewalAnswer, Renewed

AT_ONCE: Final = 500
"""Calls in one round trip: what else a server is asked for meanwhile waits some ms."""


async def renew_all(
    link: RedisLink, script: RedisScript, leases: Sequence[HeldLease], lease_ms: int
) -> list[RenewalAnswer]:
    """``HistoryStore.renew_leases``. The leases of each server go by themselves, so that one that is away holds up
    none of the others.
    """
    keys = [session_keys(lease.key) for lease in leases]
    servers = await link.servers_of([some[0] for some in keys])
    by_server: defaultdict[str, list[int]] = defaultdict(list)
    for number, server in enumerate(servers):
        by_server[server].append(number)
    answers: dict[int, RenewalAnswer] = {}

    async def renew_at_one(numbers: list[int]) -> None:
        for first in range(0, len(numbers), AT_ONCE):
            some = numbers[first : first + AT_ONCE]
            try:
                replies = await link.calls(
                    script, [(keys[number], [leases[number].token, lease_ms]) for number in some]
                )
            except Unavailable as error:
                answers.update(dict.fromkeys(numbers[first:], error))
                return
            for number, reply in zip(some, replies, strict=True):
                answers[number] = _answer(leases[number], reply)

    await all_ended(*map(renew_at_one, by_server.values()))
    if any(isinstance(answer, NotFound) for answer in answers.values()):
        await link.check_marker()  # Of a store that was emptied nothing is known.
    return [answers[number] for number in range(len(leases))]


def _answer(lease: HeldLease, reply: list[Any] | PensieveError) -> RenewalAnswer:
    if isinstance(reply, PensieveError):
        return reply
    outcome, *values = reply
    if outcome != b"OK":
        return refusal(lease.key, outcome, values, "", None, 0)
    return Renewed(parse_order(values[0]), bool(values[1]))
