"""Pages of lists."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from pensieve.http.common.failures import bad
from pensieve.http.responses.objects import listing


def page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """A page of ``items``, which are oldest first, by ``order``, ``after`` and ``limit``."""
    query = request.query_params
    if query.get("order", "desc") != "asc":
        items = items[::-1]
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad("after", f"no such item: {after}")
        items = items[ids.index(after) + 1 :]
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise bad("limit", "must be from 1 to 100")
    return listing(items[: int(limit)], has_more=len(items) > int(limit))
