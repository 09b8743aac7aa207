"""A server is killed in the middle of an answer and started again; the program goes on, and says what it saw.

python examples/retry_and_resume.py    # starts the server itself, on a history in a temporary folder
"""

import tempfile
import threading
from pathlib import Path

from pensieve import Client
from pensieve.spawn import ServerProcess

QUESTION = "What's my name?"

with tempfile.TemporaryDirectory() as folder:
    options = ("--model", "demo", "--store", f"sqlite:///{Path(folder) / 'history.sqlite3'}")
    first = ServerProcess(*options)
    address = first.target
    with Client(address, retry_for=60) as client:
        session = client.create_session(session_id="ada", max_output_tokens=100)
        session.send("My name is Ada.", request_id="introduction")

        stream = session.stream(QUESTION, request_id="question", ignore_eos=True)
        print("answer:", next(stream).text, end="", flush=True)
        first.kill()  # as by a power cut
        print(" [killed]", end="", flush=True)

        # Another process, on the same history; this program starts it, elsewhere systemd or Kubernetes does.
        started: list[ServerProcess] = []
        starter = threading.Thread(target=lambda: started.append(ServerProcess(*options, listen=address)))
        starter.start()
        for piece in stream:
            if piece.restarted:  # what that process had generated is gone: the answer begins again
                print("\nanswer:", end=" ")
            print(piece.text[:20], end="", flush=True)
        starter.join()
        print(f"\nsent {stream.resumes + 1} times, in history once: {len(session.items())} items")

        # The same request again, as by a program that does not know whether it was done: the same turn, not another.
        again = session.send(QUESTION, request_id="question", ignore_eos=True)
        print("the same turn:", again.revision == stream.turn.revision, "- items:", len(session.items()))

        # Another program, or a page that was loaded anew, follows a turn by its id alone.
        with Client(address) as other:
            followed = other.session("ada").attach("question").finish()
        print("attached:", followed.text == again.text)
    started[0].stop()
