"""Claims of request ids, for front ends that choose sessions: a retry goes to the first try's session.

A caller that names its session needs none.
"""

from __future__ import annotations

from pensieve.client import _flows
from pensieve.client._aio import AsyncClient


async def claim(
    client: AsyncClient, request_id: str, session: str, *, fingerprint: str = "", plan: str = ""
) -> tuple[str, str]:
    """Claim a request id, a UUID, before sending its turn. Return session and plan of the first claim.

    ``fingerprint`` identifies the call's content. ``plan`` is stored with the claim. Raises AlreadyExists
    (REQUEST_ID_REUSED) if a call with another fingerprint has claimed the id.
    """
    link = client._link
    return await link.run(_flows.claim(link.settings, request_id, session, fingerprint, plan))


async def release_claim(client: AsyncClient, request_id: str, session: str) -> None:
    """Release the claim of a refused call for the next one, unless the session has the turn by now."""
    link = client._link
    await link.run(_flows.release_claim(link.settings, request_id, session))
