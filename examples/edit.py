"""Regenerate, edit, rewind: history is changed in the same commit as the new answer, or not at all.

python examples/edit.py [HOST:PORT]
"""

import sys

from pensieve import Client, RevisionMismatch
from pensieve.client import Session


def show(what: str, session: Session) -> None:
    print(f"{what}:")
    for item in session.items():
        print(f"  {item.item} {item.role}: {item.text}")


with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    session = client.create_session()
    session.send("My name is Ada.")
    session.send("What's my name?")
    show("said", session)

    # Another answer to the newest question. The old one stays until the new one is committed.
    session.regenerate(temperature=0.8, seed=7)
    show("regenerated", session)

    # Another beginning: item 1 and all that follows give way to this. Numbers are never used twice.
    session.edit(1, "My name is Grace.")
    print(session.send("What's my name?").text)
    show("edited", session)

    # Back to an earlier point without saying anything.
    first = session.items()[0].item
    session.rewind(to_item=first + 1)
    show("rewound", session)

    # Two programs that edit at once: who has not seen the newest revision is told, and nothing is overwritten.
    seen = session.revision
    session.send("My cat is called Tom.")
    try:
        session.send("My cat is called Kit.", expected_revision=seen)
    except RevisionMismatch as error:
        print("refused:", error.reason)
    session.delete()
