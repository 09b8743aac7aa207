"""The back end of a chat page. The page names each turn, so it may send it again; an answer goes on without a reader.

pip install 'pensieve[http]' && python examples/web_backend.py [HOST:PORT]    # then open http://127.0.0.1:8000/
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, StreamingResponse

from pensieve import AsyncClient, PensieveError
from pensieve.client import AsyncTurnStream


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with AsyncClient([*sys.argv, "127.0.0.1:50051"][1]) as app.state.client:
        yield


async def new_chat(request: Request) -> JSONResponse:
    return JSONResponse({"chat": (await request.app.state.client.create_session()).id})


async def history(request: Request) -> JSONResponse:
    items = await request.app.state.client.session(request.path_params["chat"]).items()
    return JSONResponse([{"role": item.role, "text": item.text} for item in items])


async def turn(request: Request) -> StreamingResponse:
    session = request.app.state.client.session(request.path_params["chat"])
    text, name = (await request.body()).decode(), request.path_params["turn"]
    answer = events(session.stream(text, request_id=name, on_disconnect="finish"))
    return StreamingResponse(answer, media_type="text/event-stream")


async def events(stream: AsyncTurnStream) -> AsyncIterator[str]:
    try:
        async for piece in stream:
            kind = "restart" if piece.restarted else "piece"  # restart: drop the text so far
            yield f"event: {kind}\ndata: {json.dumps(piece.text)}\n\n"
        yield f"event: done\ndata: {json.dumps(stream.turn.finish_reason)}\n\n"
    except PensieveError as error:
        yield f"event: failed\ndata: {json.dumps(error.reason)}\n\n"


app = Starlette(lifespan=lifespan)
app.add_route("/", lambda request: FileResponse(Path(__file__).with_name("web_page.html")))
app.add_route("/chats", new_chat, methods=["POST"])
app.add_route("/chats/{chat}", history)
app.add_route("/chats/{chat}/turns/{turn}", turn, methods=["POST"])

if __name__ == "__main__":
    uvicorn.run(app, port=8000)
