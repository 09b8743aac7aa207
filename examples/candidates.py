"""Several answers to one question: all are streamed, one is in history, another may be chosen later.

python examples/candidates.py [HOST:PORT]
"""

import sys

from pensieve import Client

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    session = client.create_session()
    session.send("My name is Ada.")

    shown = ["", "", ""]
    stream = session.stream("Tell me a story.", candidates=3, temperature=1.5, seed=3, max_output_tokens=24)
    for piece in stream:
        shown[piece.candidate] += piece.text
    turn = stream.turn
    for one in turn.candidates:
        mark = "*" if one.candidate == turn.chosen else " "
        print(f"{mark} {one.candidate}: {one.text!r} ({one.finish_reason})")
    assert shown == [one.text for one in turn.candidates]

    turn = session.choose(turn, 2)
    print("chosen:", repr(turn.text), "- in history:", session.items()[-1].text == turn.text)

    # Beam search: the answer that is likeliest as a whole.
    print("beams: ", repr(session.send("What's my name?", beam_width=4).text))

    # The likeliest of several draws by itself, with what the model thought of each token.
    turn = session.send(
        "What's my name?", candidates=4, candidate_choice="best_logprob", temperature=0.7, top_logprobs=0
    )
    best = turn.candidates[turn.chosen]
    print(
        f"best:   {best.text!r}, {best.mean_logprob:.3f} per token; first token: {turn.logprobs[0].token.text!r}"
    )
    session.delete()
