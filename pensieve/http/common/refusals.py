"""Takes back what a request has made when the service then refuses its turn."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pensieve.client import AsyncSession
from pensieve.errors import ContextLimitExceeded, InvalidArgument, ResourceExhausted


@asynccontextmanager
async def made_for(turn_id: uuid.UUID, session: AsyncSession) -> AsyncIterator[None]:
    """The block begins the turn ``turn_id`` in a session that was made for it: a refusal leaves no empty session.

    Only where the id is of this call alone. One made of an ``Idempotency-Key`` may have made the session, and more, in
    another try.
    """
    try:
        yield
    except (ContextLimitExceeded, InvalidArgument, ResourceExhausted):
        if turn_id.version == 4:
            await session.delete(allow_missing=True)
        raise
