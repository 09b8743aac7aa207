"""Several users, each with a key. A user can neither see, find out about, nor slow down another's sessions.

pensieve serve --model demo --listen 127.0.0.1:50051 --api-keys examples/users.toml
python examples/users.py [HOST:PORT]
"""

import sys

from pensieve import Client, NotFound, PermissionDenied, Unauthenticated

TARGET = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
# ck_<id>_<secret>. The key file has only the SHA-256 of each secret, so that it is no secret itself.
ADA, GRACE, READER = "ck_ada_not-so-secret", "ck_grace_just-an-example", "ck_reader_looks-only"

with Client(TARGET, api_key=ADA) as ada, Client(TARGET, api_key=GRACE) as grace:
    mine = ada.create_session(session_id="diary", labels={"kind": "diary"})
    mine.send("My name is Ada.")
    # The same id, another tenant: another session.
    hers = grace.create_session(session_id="diary")
    hers.send("My name is Grace.")
    for name, session in (("ada", mine), ("grace", hers)):
        print(f"{name}: {len(session.items())} items, the first says {session.items()[0].text!r}")

    # Another tenant's session is as unknown as one that never existed.
    secret = ada.create_session()
    try:
        grace.session(secret.name).items()
    except NotFound as error:
        print("grace asks for ada's:", error.reason)

    # A key of the same tenant that may only read.
    with Client(TARGET, api_key=READER) as reader:
        print("reader sees:", reader.session("diary").items()[0].text)
        try:
            reader.session("diary").send("Hello")
        except PermissionDenied as error:
            print("reader writes:", error.reason)

    with Client(TARGET, api_key="ck_ada_guessed") as guesser:
        try:
            guesser.sessions()
        except Unauthenticated as error:
            print("a wrong key:", error.reason)
    secret.delete()  # the diaries stay: a second run goes on with them
