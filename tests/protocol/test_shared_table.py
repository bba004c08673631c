"""The board: what a holder notes, a keeper reads, and the other way round."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import signal
import threading
from functools import partial
from typing import Any

import pytest

from celery_redlock.keepalive import shared_table
from celery_redlock.keepalive.shared_table import SLOTS, LeaseRecord, SharedLeaseTable
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.errors import ConfigurationError
from celery_redlock.protocol.names import checked_names

NODES = 3


@pytest.fixture
def table() -> SharedLeaseTable:
    table = SharedLeaseTable(NODES)
    table.read = True
    return table


def posted(
    table: SharedLeaseTable, resource: str = "r", token: str = "mine", ttl: float = 10.0
) -> Claim:
    claim = Claim(resource, token, ttl, NODES)
    table.register(claim)
    return claim


def granted(
    table: SharedLeaseTable, *, now: float = 100.0, until: float = math.inf, **of: str
) -> Claim:
    claim = posted(table, **of)  # type: ignore[arg-type]
    for node in range(NODES):
        claim.acknowledged(node, now, now)
    assert claim.grant(now)
    table.granted(claim, until)
    return claim


def notes(table: SharedLeaseTable) -> list[LeaseRecord]:
    return [note for block, _pid in table.blocks() for note in table.records(block)]


def test_lease_record_lasts_from_before_the_first_request_until_unregistered(
    table: SharedLeaseTable,
) -> None:
    assert notes(table) == []
    claim = posted(table, "order:1", "t|1")
    (note,) = notes(table)
    assert (note.resource, note.token, note.ttl, note.held) == ("order:1", "t|1", 10.0, False)
    table.unregister(claim)
    assert notes(table) == []
    posted(table, "order:2#slot3")
    assert notes(table)[0].resource == "order:2"  # as its holder says, whatever slot that has


def test_lease_record_of_a_granted_claim_has_the_expiry_on_each_node(
    table: SharedLeaseTable,
) -> None:
    claim = granted(table, until=500.0)
    (note,) = notes(table)
    assert (note.held, note.until) == (True, 500.0)
    assert list(note.expiries) == [110.0] * NODES
    claim.acknowledged(1, 105.0, 105.0)
    table.renewed(claim)
    assert list(notes(table)[0].expiries) == [110.0, 115.0, 110.0]


def test_process_may_be_killed_only_if_its_lease_record_sets_a_patience(
    table: SharedLeaseTable,
) -> None:
    claim = granted(table)
    assert notes(table)[0].patience == math.inf
    table.patience(claim, 700.0)
    assert notes(table)[0].patience == 700.0
    table.releasing(claim)
    assert notes(table)[0].patience == math.inf
    table.unregister(claim)
    again = granted(table)  # in the same slot
    table.patience(claim, 700.0)  # by one that comes late
    assert [note.patience for note in notes(table)] == [math.inf]
    table.unregister(again)


def test_lease_table_holds_many_records_and_reuses_slots(table: SharedLeaseTable) -> None:
    claims = [posted(table, f"r{i}", f"t{i}") for i in range(3 * SLOTS + 1)]
    assert {note.resource for note in notes(table)} == {f"r{i}" for i in range(3 * SLOTS + 1)}
    assert {pid for _block, pid in table.blocks()} == {os.getpid()}
    blocks = len(list(table.blocks()))
    for claim in claims:
        table.unregister(claim)
    for i in range(3 * SLOTS + 1):
        posted(table, f"again{i}")
    assert len(list(table.blocks())) == blocks


def test_slot_of_a_lease_record_is_not_reused_while_its_claim_is_released(
    table: SharedLeaseTable,
) -> None:
    """Another thread may post meanwhile. Its note must outlive the end of this release."""
    first = granted(table, resource="first")
    table.releasing(first)
    first.ended = True  # and its release is on the way
    granted(table, resource="second")
    assert [(n.resource, n.held) for n in notes(table)] == [("first", False), ("second", True)]
    table.unregister(first)
    assert [(note.resource, note.held) for note in notes(table)] == [("second", True)]


def test_late_writer_changes_no_lease_record_of_another_claim(table: SharedLeaseTable) -> None:
    """A watchdog was about to write when the claim was released and its slot taken."""
    first = granted(table, resource="first")
    kept = first.kept
    table.unregister(first)
    second = granted(table, resource="second")
    first.kept = kept  # as the other thread still sees it
    first.expiries = [900.0] * NODES
    before = notes(table)
    table.renewed(first)
    table.granted(first, 900.0)
    table.releasing(first)
    table.unregister(first)
    assert notes(table) == before
    table.unregister(second)
    assert notes(table) == []


def test_process_stopped_while_it_takes_a_block_stops_no_other(table: SharedLeaseTable) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fcntl.lockf(table.fd, fcntl.LOCK_EX, 1, 0)  # of the first block
            os.write(theirs, b"!")
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    try:
        assert os.read(ours, 1) == b"!"
        os.waitid(os.P_PID, child, os.WSTOPPED)
        posting = threading.Thread(target=posted, args=(table, "goes on"), daemon=True)
        posting.start()
        posting.join(5.0)
        assert [note.resource for note in notes(table)] == ["goes on"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_lease_record_that_is_being_written_is_not_read(table: SharedLeaseTable) -> None:
    """A record whose writer was killed is not read either.

    The next holder of the slot starts it anew.
    """
    claim = granted(table)
    (note,) = notes(table)
    table._records[note.slot].generation += 1
    assert notes(table) == []
    table.unregister(claim)
    posted(table, "next")
    (after,) = notes(table)
    assert (after.slot, after.resource) == (note.slot, "next")
    assert after.generation > note.generation


def test_slot_of_a_lease_record_that_changes_hands_while_read_is_skipped(
    table: SharedLeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = granted(table, resource="first")

    def meanwhile(place: shared_table._Place) -> list[float]:
        if first.kept is not None:
            table.unregister(first)
            granted(table, resource="second")
        return []

    monkeypatch.setattr(shared_table._Place, "__call__", meanwhile)
    assert notes(table) == []
    assert [note.resource for note in notes(table)] == ["second"]


def test_holder_killed_while_it_writes_leaves_no_wrong_lease_record(
    table: SharedLeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.unregister(granted(table, resource="before"))
    child = os.fork()
    if child == 0:
        table._mine = list(range(SLOTS))  # it goes on where its parent was
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        monkeypatch.setattr(ctypes, "memmove", lambda *_args: kill())
        posted(table, "half")
        os._exit(0)
    _pid, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert notes(table) == []


def test_expiry_kept_for_a_claim_is_not_taken_for_its_successor(table: SharedLeaseTable) -> None:
    """The keeper may be stopped between reading a record and writing to it."""
    first = granted(table)
    (note,) = notes(table)
    table.extended(note, [120.0] * NODES)
    table.unregister(first)
    second = granted(table, token="other")
    table.extended(note, [900.0] * NODES)
    assert notes(table)[0].slot == note.slot
    assert list(notes(table)[0].kept) == []
    assert not second.held(111.0)


def test_expiry_partly_rewritten_by_the_supervisor_is_read_for_each_node(
    table: SharedLeaseTable,
) -> None:
    """The supervisor may be stopped in between: its earlier values do not prove a loss."""
    claim = granted(table)
    (note,) = notes(table)
    table.extended(note, [120.0, 130.0, 130.0])
    table._records[note.slot].kept[0] = 140.0
    assert list(notes(table)[0].kept) == [140.0, 130.0, 130.0]
    assert claim.held(129.0)


def test_half_written_first_expiry_of_the_supervisor_is_not_read(
    table: SharedLeaseTable,
) -> None:
    """The other half belongs to the previous record of this slot."""

    class Stopped(list[float]):
        def __getitem__(self, node: Any) -> Any:
            return KeyboardInterrupt if node else super().__getitem__(node)

    first = granted(table)
    (note,) = notes(table)
    table.extended(note, [900.0] * NODES)
    table.unregister(first)
    second = granted(table, token="other")
    (note,) = notes(table)
    with pytest.raises(TypeError):
        table.extended(note, Stopped([120.0] * NODES))
    assert list(notes(table)[0].kept) == []
    assert not second.held(111.0)


def test_block_of_a_dead_process_is_reused_by_the_next(table: SharedLeaseTable) -> None:
    granted(table)
    ((block, _pid),) = table.blocks()
    table.clear(block)
    assert list(table.blocks()) == [] and notes(table) == []
    table.forked()
    posted(table, "next")
    assert [b for b, _pid in table.blocks()] == [block]


@pytest.mark.parametrize(
    "names",
    [["ключ:\ud800|☂", "t\x00|"], [f"{number:03}" + "n" * 290 for number in range(100)]],
    ids=["any letters", "the largest claim that is allowed"],
)
def test_names_in_a_lease_record_are_stored_whole(
    table: SharedLeaseTable, names: list[str]
) -> None:
    """The supervisor does not extend a lease whose names it cannot read."""
    claim = Claim(checked_names(names) if len(names) > 2 else names, "t" * 500, 10.0, NODES)
    table.register(claim)
    (note,) = notes(table)
    assert (note.resources, note.token) == (claim.resources, claim.token)


def test_claim_too_long_for_a_lease_record_is_not_registered_and_refused_as_name(
    table: SharedLeaseTable,
) -> None:
    assert posted(table, "r" * 40_000).kept is None
    assert notes(table) == []
    with pytest.raises(ConfigurationError, match=r"at most 30000 bytes together, .* have 31\d\d\d"):
        checked_names([f"{number:03}" + "n" * 310 for number in range(100)])
