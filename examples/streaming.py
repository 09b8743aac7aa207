"""An answer as it is made, and a Stop button that keeps what was said.

python examples/streaming.py [HOST:PORT]
"""

import sys

from pensieve import Client

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    session = client.create_session(labels={"example": "streaming"})
    for text in ("My name is Ada.", "My dog is called Rex.", "What's my dog called?"):
        print(f"> {text}")
        stream = session.stream(text)
        for piece in stream:
            print(piece.text, end="", flush=True)
        turn = stream.turn  # from here on the turn is in history, whatever happens to the server
        used = turn.usage
        print(
            f"\n  {turn.finish_reason}, {used.output_tokens} tokens; of {used.context_tokens} tokens of context ",
            end="",
        )
        print(f"{used.gpu_cached_tokens} were kept, {used.new_tokens} are new")

    # Stopped in mid-answer: what was shown so far becomes the answer.
    print("> What's my name?")
    stream = session.stream("What's my name?", max_output_tokens=400, ignore_eos=True)
    for piece in stream:
        print(piece.text, end="", flush=True)
        if stream.token_count >= 8:
            turn = stream.cancel(keep="partial", keep_output_tokens=stream.token_count)
            break
    print(f"\n  {turn.finish_reason}; in history: {session.items()[-1].text!r}")
    session.delete()
