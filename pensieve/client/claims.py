"""Claims of request ids, for front ends that choose sessions for their callers: a repeated call is led to where its
first try went. Who knows its session needs none."""

from __future__ import annotations

from pensieve.client import _flows
from pensieve.client._aio import AsyncClient


async def claim(
    client: AsyncClient, request_id: str, session: str, *, fingerprint: str = "", plan: str = ""
) -> tuple[str, str]:
    """Claim a turn's request id, a UUID, for a session, before the turn is sent there; the session and the plan.

    They are those of the first claim. ``fingerprint``: of all that the call says. ``plan``: given back with the claim.
    Raises AlreadyExists (REQUEST_ID_REUSED) when another call has claimed the id.
    """
    link = client._link
    return await link.run(_flows.claim(link.settings, request_id, session, fingerprint, plan))


async def release_claim(client: AsyncClient, request_id: str, session: str) -> None:
    """The call was refused: its claim gives way to the next one, unless the session has this turn by then."""
    link = client._link
    await link.run(_flows.release_claim(link.settings, request_id, session))
