"""Many conversations at once with asyncio: the server computes their turns together, in one batch.

python examples/async_many.py [HOST:PORT]
"""

import asyncio
import sys

from pensieve import AsyncClient

NAMES = ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Frances", "Ken")


async def talk(client: AsyncClient, name: str) -> str:
    session = await client.create_session()
    await session.send(f"My name is {name}.")
    answer = ""
    async with session.stream("What's my name?") as stream:
        async for piece in stream:
            answer = piece.text if piece.restarted else answer + piece.text
    await session.delete()
    return answer


async def main() -> None:
    async with AsyncClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
        answers = await asyncio.gather(*(talk(client, name) for name in NAMES))
        for name, answer in zip(NAMES, answers, strict=True):
            print(f"{name:8} {answer}")


asyncio.run(main())
