"""``GET /health`` and ``GET /ready``, for supervisors and load balancers; neither takes a credential."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import HttpFailure


async def alive(request: Request) -> Response:
    """Whether this process answers, whatever stands behind it."""
    return HttpDoor.of(request).answer({"status": "ok"}, request)


async def ready(request: Request) -> Response:
    """Whether calls are served. Raises HttpFailure (503)."""
    door = HttpDoor.of(request)
    problem = await door.readiness.problem()
    if problem:
        raise HttpFailure(503, problem, kind="server_error", code="not_ready", retry_after_s=1.0)
    return door.answer({"status": "ok"}, request)
