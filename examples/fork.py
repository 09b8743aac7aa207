"""Branches: a conversation goes on in several ways. What they have in common is computed and kept once.

python examples/fork.py [HOST:PORT]
"""

import sys

from pensieve import Client

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    trunk = client.create_session(system_prompt="You remember what you are told.")
    for fact in (
        "My name is Ada.",
        "I live in Lisbon.",
        "My dog is called Rex.",
        "My favourite colour is green.",
    ):
        trunk.send(fact)

    branches = [trunk.fork() for _ in range(3)]
    for branch, city in zip(branches, ("Oslo", "Rome", "Lima"), strict=True):
        branch.send(f"Actually, I live in {city}.")
        turn = branch.send("Where do I live?")
        print(f"{branch.id}: {turn.text}")
    print(f"{trunk.id}: {trunk.send('Where do I live?').text}   (the trunk knows nothing of it)")

    # From an earlier point: only what was said up to that item.
    early = trunk.fork(item=trunk.items()[6].item)
    turn = early.send("What's my favourite colour?")
    print(f"{early.id}: {turn.text}")
    print(
        f"  of {turn.usage.context_tokens} tokens of context {turn.usage.gpu_cached_tokens} were there already"
    )

    for session in (trunk, early, *branches):
        session.delete()
