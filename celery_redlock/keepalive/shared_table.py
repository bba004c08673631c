"""A table of the leases that the processes of one worker hold, in memory that they share.

A process cannot extend its leases while it is stopped, or while a C call keeps the GIL; and once it
is dead it can free nothing. So every holder writes a record into this table before it asks a node
for anything: which token it is going to hold, and where. It removes the record when the lease is
released. The supervisor (`supervisor.py`), in another process, reads the records. It extends the
leases whose holders are late, and frees the leases of dead holders. In return it writes down the
expiries that the nodes acknowledged to it. A holder adopts them when its own have passed, so that
the two never contradict each other.

No process waits for another, because a process that is stopped while it writes must not stop the
others. Holder and supervisor write separate words, and words that mean something only together
are covered by a checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ..protocol.claim import Claim
from ..protocol.lease import NEVER
from ..protocol.values import shown

__all__ = ["MAX_NODES", "LeaseRecord", "SharedLeaseTable"]

MAX_NODES = 16
BLOCKS, SLOTS = 1024, 8
"""A process takes a block of slots, and another when that is full. Untouched ones cost nothing."""

_WORD = 8
_SLOT = 32768
"""Bytes: room for the names of any claim (`names.ROOM`). What is never written to costs nothing."""
_BLOCK = _SLOT * SLOTS
_HEADER = (1 + BLOCKS) * _WORD
_SIZE = _HEADER + BLOCKS * _BLOCK

# Words of the header and of a slot.
_PERIOD, _PIDS = 0, 1
_KIND, _SERIAL, _TTL, _UNTIL, _SHAPE, _FENCE, _HELD = range(7)
_KEPT = _HELD + MAX_NODES
_AREA = 2 + MAX_NODES  # checksum, count, expiries; there are two, so that one is always whole
_TEXT = (_KEPT + 2 * _AREA) * _WORD

_LENGTH = 2
"""Bytes that tell how long a name is: any character may be in it."""

_EMPTY, _ASKING, _HOLDING = 0, 1, 2


class LeaseRecord(NamedTuple):
    """One record of the table, as the supervisor reads it.

    Attributes:
        slot: Where it stands.
        serial: Tells it from an earlier note in the same slot.
        held: Whether it is granted; else its nodes are still being asked.
        resources: What is held, or asked for; all of it under one token.
        until: When extension ends (`max_lifetime`), in seconds of the clock of leases.
        expiries: Per node, what its holder was acknowledged.
        kept: Per node, what a keeper was; empty for nothing.
        fence: Its fencing token; 0 for none.
    """

    slot: int
    serial: int
    held: bool
    resources: tuple[str, ...]
    token: str
    ttl: float
    until: float
    expiries: Sequence[float]
    kept: Sequence[float]
    fence: int

    @property
    def resource(self) -> str:
        """The names of what is held, as one text for people."""
        return shown(self.resources)


class SharedLeaseTable:
    """Shared by a process and all that it forks; with a program it starts, by descriptor.

    Args:
        nodes: How many nodes the lock has.
        fd: The memory of an inherited table; None makes a new one.
        ring: Where holders ring for the keeper, inherited with `fd`.

    Attributes:
        read: Whether somebody keeps what this process writes: only then does it write.
    """

    def __init__(self, nodes: int, fd: int | None = None, ring: int | None = None) -> None:
        if nodes > MAX_NODES:
            raise ValueError(f"a board has room for {MAX_NODES} nodes, not {nodes}")
        self.nodes = nodes
        self.read = False
        self.fd = _memory() if fd is None else fd
        memory = mmap.mmap(self.fd, _SIZE)
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        self._seconds = self._bytes.cast("d")
        self._ringing = -1
        if ring is None:
            ring, self._ringing = os.pipe()
            os.set_blocking(self._ringing, False)
        os.set_blocking(ring, False)
        self.ring = ring
        self._begin()

    @classmethod
    def at(cls, address: str, nodes: int) -> SharedLeaseTable:
        """Open the table of the process that spawned this one, to write to it.

        Args:
            address: Where it is: the `address` of that table.
            nodes: How many nodes the lock has.

        Raises:
            OSError: It is gone.
        """
        memory, ring = address.split(":")
        table = cls(nodes, os.open(memory, os.O_RDWR), os.open(ring, os.O_WRONLY))
        table._ringing, table.ring = table.ring, -1
        table.read = True
        return table

    @property
    def address(self) -> str | None:
        """How a process that was spawned by this one, and inherits no descriptor, finds the table.

        None where the system has no such place: it has one on Linux.
        """
        paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in (self.fd, self._ringing)]
        return ":".join(paths) if all(map(os.path.exists, paths)) else None

    # -- The holder's side -----------------------------------------------------------------------

    def forked(self) -> None:
        """Forget the records of the parent, in the child of a fork: they are not its own."""
        self._begin()
        self.read = True  # by the process that made the table

    def _begin(self) -> None:
        # Reentrant: a handler may interrupt the thread that has it, and register a claim itself.
        self._lock = threading.RLock()
        self._mine: list[int] = []
        self._used: dict[int, Claim] = {}
        # No two notes have the same, whoever wrote them: what is kept for one must not be taken for
        # another that stands in its place.
        self._serial = int.from_bytes(os.urandom(7), "big")

    def register(self, claim: Claim) -> None:
        """Write a record, before the token is written to any node; nothing if the table is full."""
        if not self.read:
            return
        names = b"".join([_named(name) for name in claim.resources])
        text = names + claim.token.encode("utf-8", "surrogatepass")
        if len(text) > _SLOT - _TEXT:
            return
        with self._lock:
            blocks = len(self._mine)
            slot = self._free_slot()
            if slot is None:
                return
            self._serial += 1
            serial = self._serial
            word = slot // _WORD
            kept = partial(self._kept, word, serial)
            # In one step, and last: a strike before this leaves the slot free, and a handler that
            # has interrupted us may have taken it.
            if self._used.setdefault(slot, claim) is not claim:
                return
            claim.kept = kept
            news = len(self._mine) > blocks
        nodes, words, seconds = self.nodes, self._words, self._seconds
        words[word + _KIND] = _EMPTY
        words[word + _SERIAL] = serial
        seconds[word + _TTL] = claim.ttl
        for node in range(nodes):
            seconds[word + _HELD + node] = NEVER
        self._bytes[slot + _TEXT : slot + _TEXT + len(text)] = text
        words[word + _SHAPE] = _shape(len(names), len(text), _checksum(serial, claim.ttl, text))
        words[word + _KIND] = _ASKING
        # A block is to be watched; or it looks this often, and would come too late.
        if news or claim.ttl < 4 * seconds[_PERIOD]:
            self._knock()

    def granted(self, claim: Claim, until: float) -> None:
        """Record that it is granted, and is to be extended until `until`; seconds."""
        with self._lock:
            word = self._word_of(claim)
            if word is not None:
                self._seconds[word + _UNTIL] = until
                self._words[word + _FENCE] = claim.fencing_token or 0
                self._write_held(word, claim)
                self._words[word + _KIND] = _HOLDING

    def renewed(self, claim: Claim) -> None:
        """Record the expiries that its holder knows now: later ones, or one that a node forgot."""
        with self._lock:
            word = self._word_of(claim)
            if word is not None:
                self._write_held(word, claim)

    def releasing(self, claim: Claim) -> None:
        """Stop the supervisor from extending it; if its holder dies now, it is still freed."""
        with self._lock:
            word = self._word_of(claim)
            if word is not None:
                self._words[word + _KIND] = _ASKING

    def unregister(self, claim: Claim) -> None:
        """Remove the record: it is released, lost or left to expire."""
        with self._lock:
            word = self._word_of(claim)
            if word is not None:
                self._words[word + _KIND] = _EMPTY
                self._used.pop(word * _WORD, None)
                claim.kept = None

    def _word_of(self, claim: Claim) -> int | None:
        """The place of its record, if it has one; a moment later that may be another's."""
        if claim.kept is None:
            return None
        word: int = claim.kept.args[0]  # type: ignore[attr-defined]
        return word if self._used.get(word * _WORD) is claim else None

    def _write_held(self, word: int, claim: Claim) -> None:
        for node, expiry in enumerate(claim.acknowledgements()):
            self._seconds[word + _HELD + node] = expiry

    def _kept(self, word: int, serial: int) -> Sequence[float]:
        """The expiries that the supervisor was acknowledged, per node; empty for none."""
        newest = self._newest(word, serial)
        return newest[2] if newest is not None else ()

    def _newest(self, word: int, serial: int) -> tuple[int, int, Sequence[float]] | None:
        """The last expiries that were written completely: their count, their place, themselves."""
        whole = []
        for area in (word + _KEPT, word + _KEPT + _AREA):
            count = self._words[area + 1]
            expiries = self._seconds[area + 2 : area + 2 + self.nodes].tolist()
            if self._words[area] == _sum(serial, count, expiries):
                whole.append((count, area, expiries))
        return max(whole, default=None)

    def _free_slot(self) -> int | None:
        """Return a slot that no claim of ours uses; one that is being released is still used."""
        for slot in self._mine:
            if slot not in self._used:
                return slot
        block = self._take_block()
        if block is None:
            return None
        self._mine += range(block, block + _BLOCK, _SLOT)
        return block

    def _take_block(self) -> int | None:
        words = self._words
        for number in range(BLOCKS):
            if words[_PIDS + number]:
                continue
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            except OSError:
                continue  # another process is just taking this one
            try:
                if not words[_PIDS + number]:
                    words[_PIDS + number] = os.getpid()
                    return _HEADER + number * _BLOCK
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, number)
        return None

    def _knock(self) -> None:
        with contextlib.suppress(OSError):  # full: it is on its way already
            os.write(self._ringing, b"\0")

    # -- The keeper's side -----------------------------------------------------------------------

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield each block that a process has taken, with its pid."""
        for number, pid in enumerate(self._words[_PIDS : _PIDS + BLOCKS].tolist()):
            if pid:
                yield _HEADER + number * _BLOCK, pid

    def records(self, block: int) -> Iterator[LeaseRecord]:
        """Yield the records of a block, except those that are being written."""
        for slot in range(block, block + _BLOCK, _SLOT):
            note = self._read(slot)
            if note is not None:
                yield note

    def _read(self, slot: int) -> LeaseRecord | None:
        word = slot // _WORD
        kind, serial = self._words[word + _KIND], self._words[word + _SERIAL]
        if kind == _EMPTY:
            return None
        ttl, until = self._seconds[word + _TTL], self._seconds[word + _UNTIL]
        names_length, length, checksum = _from_shape(self._words[word + _SHAPE])
        text = bytes(self._bytes[slot + _TEXT : slot + _TEXT + min(length, _SLOT - _TEXT)])
        if checksum != _checksum(serial, ttl, text):
            return None
        expiries = self._seconds[word + _HELD : word + _HELD + self.nodes].tolist()
        kept = self._kept(word, serial)
        resources = tuple(_names(text[:names_length]))
        token = text[names_length:].decode("utf-8", "surrogatepass")
        held = kind == _HOLDING
        fence = self._words[word + _FENCE] if held else 0
        return LeaseRecord(slot, serial, held, resources, token, ttl, until, expiries, kept, fence)

    def stands(self, slot: int, serial: int) -> bool:
        """Return whether a record is still there, and its holder wants it extended."""
        word = slot // _WORD
        return self._words[word + _SERIAL] == serial and self._words[word + _KIND] == _HOLDING

    def extended(self, note: LeaseRecord, expiries: Sequence[float]) -> None:
        """Write down for its holder what the nodes acknowledged to the supervisor."""
        first = note.slot // _WORD + _KEPT
        newest = self._newest(note.slot // _WORD, note.serial)
        count, area = (newest[0] + 1, newest[1]) if newest is not None else (1, first + _AREA)
        area = first if area != first else first + _AREA  # the other one
        self._words[area + 1] = count
        for node, expiry in enumerate(expiries):
            self._seconds[area + 2 + node] = expiry
        self._words[area] = _sum(note.serial, count, expiries)

    def clear(self, block: int) -> None:
        """Make the block of a dead process free for the next one."""
        for slot in range(block, block + _BLOCK, _SLOT):
            self._words[slot // _WORD + _KIND] = _EMPTY
        self._words[_PIDS + (block - _HEADER) // _BLOCK] = 0

    def looks_every(self, period: float) -> None:
        """Write down how often the supervisor looks; seconds."""
        self._seconds[_PERIOD] = period


def _memory() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("celery_redlock board")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _SIZE)
    return fd


def _sum(serial: int, count: int, expiries: Sequence[float]) -> int:
    return zlib.crc32(struct.pack(f"qq{len(expiries)}d", serial, count, *expiries))


def _checksum(serial: int, ttl: float, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(struct.pack("qd", serial, ttl)))


def _named(name: str) -> bytes:
    text = name.encode("utf-8", "surrogatepass")
    return len(text).to_bytes(_LENGTH, "big") + text


def _names(text: bytes) -> Iterator[str]:
    while text:
        end = _LENGTH + int.from_bytes(text[:_LENGTH], "big")
        yield text[_LENGTH:end].decode("utf-8", "surrogatepass")
        text = text[end:]


def _shape(names: int, text: int, checksum: int) -> int:
    return names | text << 15 | checksum << 30


def _from_shape(shape: int) -> tuple[int, int, int]:
    return shape & 0x7FFF, shape >> 15 & 0x7FFF, shape >> 30
