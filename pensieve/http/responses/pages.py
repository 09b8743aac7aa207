"""Pages of lists."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from pensieve.http.common.failures import bad
from pensieve.http.common.requests import whole_number
from pensieve.http.responses.objects import listing


def page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """A page of ``items``, which are oldest first, by ``order``, ``after``, ``before`` and ``limit``.

    Raises HttpFailure.
    """
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad("order", "must be asc or desc")
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        items = items[_index(items, "after", after) + 1 :]
    if (before := query.get("before")) is not None:
        items = items[: _index(items, "before", before)]
    limit = whole_number(query.get("limit", "20"))
    if limit is None or not 1 <= limit <= 100:
        raise bad("limit", "must be from 1 to 100")
    return listing(items[:limit], has_more=len(items) > limit)


def _index(items: list[dict[str, Any]], param: str, wanted: str) -> int:
    ids = [item["id"] for item in items]
    if wanted not in ids:
        raise bad(param, f"no such item: {wanted}")
    return ids.index(wanted)
