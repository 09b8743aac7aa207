"""The chunks that sessions of a ``TurnCache`` own together: ``engine.cache.sharing`` without token ids.

The load declares the pieces that a session's first input begins with. So a chunk's address is a number for
its content and everything before it, known from the first admission on, and there are no duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve.replay.load.workload import Piece
from pensieve.simulate.turns.victims import ELSEWHERE, ChunkHolder, PlacesIndex, SharedHolder, SharingSession

TextRange = tuple[str, int, int]
"""A range of a text's tokens: (name, start, end)."""


class ChunkAddresses:
    """Numbers the chunks that lie wholly within shared beginnings."""

    def __init__(self, chunk_tokens: int) -> None:
        self._size = chunk_tokens
        self._numbers: dict[tuple[int, tuple[TextRange, ...]], int] = {}
        self._known: dict[tuple[Piece, ...], tuple[int, ...]] = {}

    def for_prefix(self, prefix: tuple[Piece, ...]) -> tuple[int, ...]:
        """Return the addresses of the leading chunks of a session that begins with ``prefix``."""
        found = self._known.get(prefix)
        if found is None:
            found = self._known[prefix] = tuple(self._chain(prefix))
        return found

    def _chain(self, prefix: tuple[Piece, ...]) -> list[int]:
        chain: list[int] = []
        content: list[TextRange] = []
        room, last = self._size, 0
        for name, tokens in prefix:
            at = 0
            while at < tokens:
                end = min(at + room, tokens)
                content.append((name, at, end))
                room -= end - at
                at = end
                if room == 0:
                    last = self._numbers.setdefault((last, tuple(content)), len(self._numbers) + 1)
                    chain.append(last)
                    content, room = [], self._size
        return chain


class Sharing:
    """The shared runs, and the holder of each address; updates ``both``, ``spares`` and ``in_flight`` of its cache."""

    def __init__(
        self,
        index: PlacesIndex,
        chunk_tokens: int,
        both: dict[ChunkHolder, None],
        spares: dict[ChunkHolder, None],
        in_flight: dict[ChunkHolder, None],
    ) -> None:
        self._index = index
        self._both, self._spares, self._in_flight = both, spares, in_flight
        self._addresses = ChunkAddresses(chunk_tokens)
        self._holders: dict[int, SharingSession | SharedHolder] = {}

    def addresses(self, prefix: tuple[Piece, ...]) -> tuple[int, ...]:
        return self._addresses.for_prefix(prefix)

    def find(self, addresses: Sequence[int], start: int) -> list[SharingSession | SharedHolder]:
        """Holders of the chunks from ``start`` on, up to the first chunk without one."""
        found: list[SharingSession | SharedHolder] = []
        for address in addresses[start:]:
            holder = self._holders.get(address)
            if holder is None:
                break
            found.append(holder)
        return found

    def register(self, session: SharingSession) -> None:
        """Make the session's own chunks findable, including those that it is about to compute."""
        for address in session.addresses[session.own_start :]:
            assert self._holders.setdefault(address, session) is session, "an address is taken"

    def unregister(self, session: SharingSession, start: int) -> None:
        """Make the session's own chunks from ``start`` on unfindable."""
        for address in session.addresses[max(start, session.own_start) :]:
            if self._holders.get(address) is session:
                del self._holders[address]

    def adopt(self, session: SharingSession, found: Sequence[SharingSession | SharedHolder]) -> None:
        """Add chunks of other holders to a session, behind its own chunks, all of which it shares."""
        start = at = session.own_start
        end = start + len(found)
        while at < end:
            run = self._run_up_to(found[at - start], at, end)
            run.owners[session] = None
            self._index.table.claims.add(run.row, session.row)
            session.runs.append(run)
            at += run.num_chunks
        session.own_start = end
        session.places += bytes((ELSEWHERE,)) * len(found)

    def disown(self, session: SharingSession, keep: int) -> None:
        """Reduce a session to its first ``keep`` chunks. All chunks involved are shared."""
        while session.own_start > keep:
            run = session.runs[-1]
            if run.own_start < keep:
                self._split(run, keep)
            session.runs.pop()
            del run.owners[session]
            self._index.table.claims.remove(run.row, session.row)
            session.own_start = run.own_start
            del session.places[session.own_start :]
            if len(run.owners) == 1:
                self._dissolve(run)

    def clear(self) -> None:
        self._holders.clear()

    def _run_up_to(self, holder: SharingSession | SharedHolder, at: int, end: int) -> SharedHolder:
        """Return the run from chunk ``at`` to ``end`` at most; make it if it does not exist."""
        assert holder.own_start == at, f"chunk {at}: adopted from the middle"
        if isinstance(holder, SharingSession):
            return self._share(holder, end)
        return self._split(holder, end) if len(holder.places) > end else holder

    def _share(self, owner: SharingSession, end: int) -> SharedHolder:
        run = self._new_run(owner, end, {owner: None})
        owner.runs.append(run)
        owner.own_start = end
        self._index.touch(owner)
        return run

    def _split(self, run: SharedHolder, end: int) -> SharedHolder:
        leading = self._new_run(run, end, dict(run.owners))
        for owner in run.owners:
            owner.runs.insert(owner.runs.index(run), leading)
        run.own_start = end
        self._index.touch(run)
        return leading

    def _new_run(
        self, source: SharingSession | SharedHolder, end: int, owners: dict[SharingSession, None]
    ) -> SharedHolder:
        """Move the source's chunks up to ``end`` to a new run."""
        first = source.own_start
        run = SharedHolder(
            -1, self._index.add_row(), addresses=source.addresses, owners=owners, own_start=first
        )
        # In place, leaving no candidate: a ranking may refer to the source's chunks.
        run.places = bytearray((ELSEWHERE,)) * first + source.places[first:end]
        source.places[first:end] = bytes((ELSEWHERE,)) * (end - first)
        run.running = source.running
        run.pins = source.pins if isinstance(source, SharedHolder) else int(source.running)
        for address in run.addresses[first:end]:
            self._holders[address] = run
        self._index.attach(run)
        for owner in owners:
            self._index.table.claims.add(run.row, owner.row)
        if source in self._in_flight:
            self._in_flight[run] = None
        if source in self._both:
            self._both[run] = None
        if source in self._spares:  # its chunks come first
            spares = list(self._spares)
            spares.insert(spares.index(source), run)
            self._spares.clear()
            self._spares.update(dict.fromkeys(spares))
        return run

    def _dissolve(self, run: SharedHolder) -> None:
        """Return a run to its only owner, which is idle: chunks of a running owner stay cached for all."""
        (owner,) = run.owners
        assert owner.runs[-1] is run and not owner.running
        self._index.table.claims.remove(run.row, owner.row)
        self._index.remove(run)
        owner.runs.pop()
        first, end = run.own_start, len(run.places)
        owner.own_start = first
        owner.places[first:end] = run.places[first:]
        run.places[first:] = bytes(run.num_chunks)  # a ranking may refer to them
        for address in run.addresses[first:end]:
            self._holders[address] = owner
        for members in (self._both, self._in_flight):
            if run in members:
                del members[run]
                members[owner] = None
        self._index.touch(owner)
