"""Hints: the server is told when a user is typing, when the next turn is expected, and that a session is over.

They change what is kept in the cache, and never an answer.

python examples/warm_hints.py [HOST:PORT]
"""

import sys

from pensieve import Client

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    session = client.create_session()
    session.send("My name is Ada.")

    # An agent whose next step comes in about two seconds; worth five times what any other session is.
    turn = session.send("My dog is called Rex.", next_turn_in=2.0, importance=5.0)
    hints = turn.hints
    print("taken:", hints and (hints.next_turn_s, hints.importance), "ignored:", hints and hints.ignored)

    # The user has begun to type: what was pushed out of the device's memory may come back meanwhile.
    warming = session.warm()
    where = warming.residency
    print("warmed:", warming.accepted, f"({warming.refused})" if warming.refused else "")
    print(
        f"on the device: {where.gpu_tokens} tokens, on the host: {where.host_tokens}, dropped: {where.dropped_tokens}"
    )

    turn = session.send("What's my dog called?", session_finished=True)
    used = turn.usage
    print(turn.text)
    print(
        f"context {used.context_tokens} = {used.gpu_cached_tokens} cached + {used.swapped_in_tokens} swapped in ",
        end="",
    )
    print(f"+ {used.recomputed_tokens} recomputed + {used.new_tokens} new")
    session.delete()
