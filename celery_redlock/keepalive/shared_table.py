"""A table of the leases that the processes of one worker hold, in memory that they share.

A process cannot extend its leases while it is stopped, or while a C call keeps the GIL; and a dead
process can release nothing. So every holder writes a record into this table before it asks a node
for anything: the token, and the names that it is for. It removes the record when the lease is
released. The supervisor (`supervisor.py`), in another process, reads the records. It extends the
leases whose holders are late, and releases the leases of dead holders. In return it writes down the
expiries that the nodes acknowledged to it. A holder adopts them when its own have passed, so that
the two never contradict each other.

No process waits for another, because a process that is stopped while it writes must not stop the
others. Three rules take the place of a lock:

- A record has a generation, which only ever grows. It is odd while the names and the token are
  being written, and a record with an odd generation is not read. So a holder that is killed in
  between leaves nothing that could be mistaken for a lease. And a note about one record is never
  taken for a note about the next record in the same slot.
- Each field has one writer, the holder or the supervisor.
- An expiry is one aligned double and a fact by itself: a node has acknowledged the token until
  then. Old and new expiries of different nodes may be read together.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..protocol.claim import Claim
from ..protocol.lease import NEVER
from ..protocol.names import base_of
from ..protocol.texts import shown

__all__ = ["MAX_NODES", "LeaseRecord", "SharedLeaseTable"]

MAX_NODES = 16
BLOCKS, SLOTS = 1024, 8
"""Number of blocks, and of slots in each. A process takes a block, and another if that is full."""
MAX_TEXT_BYTES = 32_000
"""Room for the names of any claim (`names.MAX_NAMES_BYTES`) and its token. Memory pages that are
never written to take no memory."""

_EMPTY, _ASKING, _HOLDING = 0, 1, 2


class _Record(ctypes.Structure):
    """One slot. The supervisor writes `kept` and `kept_for`, the holder all the rest."""

    _fields_ = (
        ("generation", ctypes.c_int64),
        ("state", ctypes.c_int64),
        ("until", ctypes.c_double),
        ("patience", ctypes.c_double),
        ("fence", ctypes.c_int64),
        ("expiries", ctypes.c_double * MAX_NODES),
        ("kept_for", ctypes.c_int64),  # the generation that `kept` belongs to
        ("kept", ctypes.c_double * MAX_NODES),
        ("size", ctypes.c_int64),
        ("text", ctypes.c_char * MAX_TEXT_BYTES),  # JSON: ttl, token, names
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("pids", ctypes.c_int64 * BLOCKS),
        ("paused", ctypes.c_int64),  # the main process writes it; see `LeaseRegistry.paused`
        ("records", _Record * (BLOCKS * SLOTS)),
    )


class LeaseRecord(NamedTuple):
    """One record of the table, as the supervisor reads it.

    Attributes:
        slot: Its slot.
        generation: The number that distinguishes it from an earlier record in the same slot.
        held: True if it is granted; otherwise the nodes are still being asked.
        resources: The names that are held or asked for, all with one token.
        until: The end of extensions (`max_lifetime`), by the clock of leases; seconds.
        expiries: Per node, the expiry that it acknowledged to the holder.
        kept: Per node, the expiry that it acknowledged to a supervisor; empty if none extended it.
        fence: Its fencing token; 0 for none.
        patience: The time from which its process may be killed, by `time.monotonic()`: see
            `locking/progress.py`.
    """

    slot: int
    generation: int
    held: bool
    resources: tuple[str, ...]
    token: str
    ttl: float
    until: float
    expiries: Sequence[float]
    kept: Sequence[float]
    fence: int
    patience: float

    @property
    def name(self) -> tuple[int, int]:
        """Its slot and generation, which no other record of this table has."""
        return self.slot, self.generation

    @property
    def resource(self) -> str:
        """The locked keys as one text for people, without the numbers of their slots."""
        return shown([base_of(name) for name in self.resources])


class _Place:
    """The place of a claim in the table. Call it for the expiries that a supervisor noted there."""

    __slots__ = ("generation", "nodes", "record", "slot")

    def __init__(self, slot: int, record: _Record, generation: int, nodes: int) -> None:
        self.slot, self.record, self.generation, self.nodes = slot, record, generation, nodes

    def __call__(self) -> Sequence[float]:
        before = self.record.kept_for
        kept = self.record.kept[: self.nodes]
        return kept if before == self.record.kept_for == self.generation else ()


class SharedLeaseTable:
    """The table, which a process shares with its forks, and by descriptor with a program it starts.

    Args:
        nodes: The number of nodes of the lock.
        fd: A descriptor of an existing table's memory; None makes a new table.

    Attributes:
        read: True if a supervisor reads the records of this process; only then it writes any.
    """

    def __init__(self, nodes: int, fd: int | None = None) -> None:
        if nodes > MAX_NODES:
            raise ValueError(f"a table of leases has room for {MAX_NODES} nodes, not {nodes}")
        self.nodes = nodes
        self.read = False
        self.fd = _memory() if fd is None else fd
        self._memory = _Memory.from_buffer(mmap.mmap(self.fd, ctypes.sizeof(_Memory)))
        self._records = self._memory.records
        self._begin()

    @classmethod
    def at(cls, address: str, nodes: int) -> SharedLeaseTable:
        """Open the table of the process that spawned this one, to write to it.

        Args:
            address: The `address` of that table.
            nodes: The number of nodes of the lock.

        Raises:
            OSError: The table does not exist any more.
        """
        table = cls(nodes, os.open(address, os.O_RDWR))
        table.read = True
        return table

    @property
    def paused(self) -> bool:
        """True if keys may be paused."""
        return bool(self._memory.paused)

    @paused.setter
    def paused(self, may_be: bool) -> None:
        self._memory.paused = may_be

    @property
    def address(self) -> str | None:
        """A path to the table for spawned processes, which inherit no descriptor.

        None if the system has no such paths; Linux has.
        """
        path = f"/proc/{os.getpid()}/fd/{self.fd}"
        return path if os.path.exists(path) else None

    # -- The holder's side -----------------------------------------------------------------------

    def forked(self) -> None:
        """Forget the parent's records, in the child of a fork."""
        self._begin()
        self.read = True  # the process that made the table reads it

    def _begin(self) -> None:
        # Reentrant: a handler may interrupt the thread that holds it, and register a claim itself.
        self._lock = threading.RLock()
        self._mine: list[int] = []
        self._used: dict[int, Claim] = {}

    def register(self, claim: Claim) -> None:
        """Write a record before the token is written to any node; skip it if the table is full."""
        if not self.read:
            return
        text = _encode([claim.ttl, claim.token, *claim.resources]).encode("utf-8", "surrogatepass")
        if len(text) > MAX_TEXT_BYTES:
            return
        with self._lock:
            slot = self._free_slot()
            if slot is None:
                return
            record = self._records[slot]
            generation = record.generation + 1 | 1  # the next odd one
            claim.kept = _Place(slot, record, generation + 1, self.nodes)
            # In one step, and last: an exception that strikes before this leaves the slot free, and
            # a handler that has interrupted us may have taken it.
            if self._used.setdefault(slot, claim) is not claim:
                claim.kept = None
                return
        record.generation = generation
        record.expiries[: self.nodes] = [NEVER] * self.nodes
        record.patience = math.inf
        record.size = len(text)
        ctypes.memmove(ctypes.addressof(record) + _Record.text.offset, text, len(text))
        record.state = _ASKING
        record.generation = generation + 1

    def granted(self, claim: Claim, until: float) -> None:
        """Record a grant, and the time until which it must be extended; seconds."""
        with self._lock:
            if (record := self._record_of(claim)) is not None:
                record.until = until
                record.fence = claim.fencing_token or 0
                record.expiries[: self.nodes] = claim.acknowledgements()
                record.state = _HOLDING

    def renewed(self, claim: Claim) -> None:
        """Record the holder's expiries after an extension: later, or unset if a node forgot it."""
        with self._lock:
            if (record := self._record_of(claim)) is not None:
                record.expiries[: self.nodes] = claim.acknowledgements()

    def patience(self, claim: Claim, until: float) -> None:
        """Record the time from which its process may be killed, by `time.monotonic()`."""
        with self._lock:
            if (record := self._record_of(claim)) is not None:
                record.patience = until

    def releasing(self, claim: Claim) -> None:
        """Stop the supervisor from extending it; if its holder dies now, it is still released."""
        with self._lock:
            if (record := self._record_of(claim)) is not None:
                record.state = _ASKING

    def unregister(self, claim: Claim) -> None:
        """Remove the record of a claim that is released, is lost, or will expire."""
        with self._lock:
            if (record := self._record_of(claim)) is not None:
                record.state = _EMPTY
                self._used.pop(claim.kept.slot, None)  # type: ignore[union-attr]
                claim.kept = None

    def _record_of(self, claim: Claim) -> _Record | None:
        """Return its record, if it has one; a moment later another claim may have the slot."""
        place = claim.kept
        if isinstance(place, _Place) and self._used.get(place.slot) is claim:
            return place.record
        return None

    def _free_slot(self) -> int | None:
        """Return a slot that no claim of ours uses; a claim that is being released still does."""
        for slot in self._mine:
            if slot not in self._used:
                return slot
        block = self._take_block()
        if block is None:
            return None
        self._mine += range(block * SLOTS, (block + 1) * SLOTS)
        return block * SLOTS

    def _take_block(self) -> int | None:
        pids = self._memory.pids
        for block in range(BLOCKS):
            if pids[block]:
                continue
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, block)
            except OSError:
                continue  # another process is just taking this block
            try:
                if not pids[block]:
                    pids[block] = os.getpid()
                    return block
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, block)
        return None

    # -- The supervisor's side -------------------------------------------------------------------

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield each block that a process has taken, with its pid."""
        for block, pid in enumerate(self._memory.pids[:]):
            if pid:
                yield block, pid

    def records(self, block: int) -> Iterator[LeaseRecord]:
        """Yield the records of a block, except those that are being written."""
        for slot in range(block * SLOTS, (block + 1) * SLOTS):
            record = self._read(slot)
            if record is not None:
                yield record

    def _read(self, slot: int) -> LeaseRecord | None:
        record = self._records[slot]
        generation, state = record.generation, record.state
        if state == _EMPTY or generation % 2:
            return None
        text = record.text[: record.size]
        expiries = record.expiries[: self.nodes]
        kept = _Place(slot, record, generation, self.nodes)()
        until, fence, patience = record.until, record.fence, record.patience
        if record.generation != generation:
            return None
        ttl, token, *names = json.loads(text.decode("utf-8", "surrogatepass"))
        held = state == _HOLDING
        return LeaseRecord(
            *(slot, generation, held, tuple(names), token, ttl, until, expiries, kept),
            fence=fence if held else 0,
            patience=patience if held else math.inf,
        )

    def stands(self, slot: int, generation: int) -> bool:
        """Return True if a record is still there, and its holder wants it extended."""
        record = self._records[slot]
        return bool(record.generation == generation and record.state == _HOLDING)

    def extended(self, note: LeaseRecord, expiries: Sequence[float]) -> None:
        """Write down, for the holder, the expiries that nodes acknowledged to the supervisor."""
        record = self._records[note.slot]
        record.kept[: self.nodes] = expiries
        record.kept_for = note.generation  # last: until then some belong to another record

    def remove(self, record: LeaseRecord) -> None:
        """Remove the record of a dead process."""
        self._records[record.slot].state = _EMPTY

    def clear(self, block: int) -> None:
        """Make the block of a dead process available again."""
        for slot in range(block * SLOTS, (block + 1) * SLOTS):
            self._records[slot].state = _EMPTY
        self._memory.pids[block] = 0


_encode = json.JSONEncoder(ensure_ascii=False).encode


def _memory() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("celery_redlock leases")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, ctypes.sizeof(_Memory))
    return fd
