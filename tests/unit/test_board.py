"""The board: what a holder notes, a keeper reads, and the other way round."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import threading

import pytest

from celery_redlock.keepalive.shared_table import MAX_NODES, SLOTS, Board, Note
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.errors import ConfigurationError
from celery_redlock.protocol.lease import NEVER, drift
from celery_redlock.protocol.names import checked_names

NODES = 3


@pytest.fixture
def board() -> Board:
    board = Board(NODES)
    board.read = True
    return board


def posted(board: Board, resource: str = "r", token: str = "mine", ttl: float = 10.0) -> Claim:
    claim = Claim(resource, token, ttl, NODES)
    board.post(claim)
    return claim


def granted(board: Board, *, now: float = 100.0, until: float = math.inf, **of: str) -> Claim:
    claim = posted(board, **of)  # type: ignore[arg-type]
    for node in range(NODES):
        claim.acknowledged(node, now, now)
    assert claim.grant(now)
    board.hold(claim, until)
    return claim


def notes(board: Board) -> list[Note]:
    return [note for block, _pid in board.blocks() for note in board.notes(block)]


def test_a_note_stands_from_before_the_first_request_until_it_is_struck_off(board: Board) -> None:
    assert notes(board) == []
    claim = posted(board, "order:1", "t|1")
    (note,) = notes(board)
    assert (note.resource, note.token, note.ttl, note.held) == ("order:1", "t|1", 10.0, False)
    board.strike_off(claim)
    assert notes(board) == []


def test_a_granted_note_says_until_when_each_node_holds_it(board: Board) -> None:
    claim = granted(board, until=500.0)
    (note,) = notes(board)
    assert (note.held, note.until) == (True, 500.0)
    assert list(note.expiries) == [110.0] * NODES
    claim.acknowledged(1, 105.0, 105.0)
    board.renewed(claim)
    assert list(notes(board)[0].expiries) == [110.0, 115.0, 110.0]


def test_nothing_is_noted_where_nobody_reads(board: Board) -> None:
    board.read = False
    claim = posted(board)
    assert notes(board) == [] and claim.kept is None
    board.hold(claim, math.inf)
    board.strike_off(claim)


def test_many_are_noted_and_slots_are_used_again(board: Board) -> None:
    claims = [posted(board, f"r{i}", f"t{i}") for i in range(3 * SLOTS + 1)]
    assert {note.resource for note in notes(board)} == {f"r{i}" for i in range(3 * SLOTS + 1)}
    assert {pid for _block, pid in board.blocks()} == {os.getpid()}
    blocks = len(list(board.blocks()))
    for claim in claims:
        board.strike_off(claim)
    for i in range(3 * SLOTS + 1):
        posted(board, f"again{i}")
    assert len(list(board.blocks())) == blocks


def test_a_slot_is_nobody_elses_while_its_claim_is_being_released(board: Board) -> None:
    """Another thread may post meanwhile. Its note must outlive the end of this release."""
    first = granted(board, resource="first")
    board.leave(first)
    first.ended = True  # and nodes are being told
    granted(board, resource="second")
    assert [(n.resource, n.held) for n in notes(board)] == [("first", False), ("second", True)]
    board.strike_off(first)
    assert [(note.resource, note.held) for note in notes(board)] == [("second", True)]


def test_whoever_is_late_writes_into_nobody_elses_note(board: Board) -> None:
    """A watchdog that was about to write when the claim was released, and its place taken."""
    first = granted(board, resource="first")
    kept = first.kept
    board.strike_off(first)
    second = granted(board, resource="second")
    first.kept = kept  # as the other thread still sees it
    first.expiries = [900.0] * NODES
    before = notes(board)
    board.renewed(first)
    board.hold(first, 900.0)
    board.leave(first)
    board.strike_off(first)
    assert notes(board) == before
    board.strike_off(second)
    assert notes(board) == []


def test_a_process_stopped_while_it_takes_a_block_stops_nobody(board: Board) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fcntl.lockf(board.fd, fcntl.LOCK_EX, 1, 0)  # of the first block
            os.write(theirs, b"!")
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    try:
        assert os.read(ours, 1) == b"!"
        os.waitid(os.P_PID, child, os.WSTOPPED)
        posting = threading.Thread(target=posted, args=(board, "goes on"), daemon=True)
        posting.start()
        posting.join(5.0)
        assert [note.resource for note in notes(board)] == ["goes on"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_name_too_long_for_the_board_is_not_noted(board: Board) -> None:
    assert posted(board, "r" * 40_000).kept is None
    assert notes(board) == []


def test_names_of_any_letters_are_noted_whole(board: Board) -> None:
    posted(board, "ключ:\ud800|☂", "t\x00|")
    (note,) = notes(board)
    assert (note.resource, note.token) == ("ключ:\ud800|☂", "t\x00|")


@pytest.mark.parametrize("word", [1, 2, 4], ids=["serial", "ttl", "checksum"])
def test_a_note_that_is_not_whole_is_not_read(board: Board, word: int) -> None:
    granted(board)
    (note,) = notes(board)
    board._words[note.slot // 8 + word] ^= 1 << 33
    assert notes(board) == []


def test_what_a_keeper_was_acknowledged_reaches_the_holder(board: Board) -> None:
    claim = granted(board)
    (note,) = notes(board)
    assert list(note.kept) == []
    board.keep(note, [150.0, 150.0, NEVER])
    assert list(notes(board)[0].kept) == [150.0, 150.0, NEVER]
    assert claim.held(149.0 - drift(10.0))
    assert not claim.held(150.0)
    assert claim.lost == "expired"


def test_what_was_kept_for_one_is_never_taken_for_its_successor(board: Board) -> None:
    """The keeper may be stopped between reading a note and writing to it."""
    first = granted(board)
    (note,) = notes(board)
    board.keep(note, [120.0] * NODES)
    board.strike_off(first)
    second = granted(board, token="other")
    board.keep(note, [900.0] * NODES)
    assert notes(board)[0].slot == note.slot
    assert list(notes(board)[0].kept) == []
    assert not second.held(111.0)


def test_half_of_what_a_keeper_writes_is_not_read(board: Board) -> None:
    claim = granted(board)
    (note,) = notes(board)
    board.keep(note, [150.0] * NODES)
    _count, area, _expiries = board._newest(note.slot // 8, note.serial) or (0, 0, [])
    board._seconds[area + 2] = 900.0
    assert list(notes(board)[0].kept) == []
    assert not claim.held(111.0)


def test_while_a_keeper_writes_what_it_wrote_before_is_read(board: Board) -> None:
    """It may be stopped in the midst: its word of before is no reason to call a lease lost."""
    claim = granted(board)
    (note,) = notes(board)
    for expiry in (120.0, 130.0, 140.0):
        board.keep(note, [expiry] * NODES)
        assert list(notes(board)[0].kept) == [expiry] * NODES
    _count, area, _expiries = board._newest(note.slot // 8, note.serial) or (0, 0, [])
    board._seconds[area + 2] = 900.0
    assert list(notes(board)[0].kept) == [130.0] * NODES
    assert claim.held(129.0)


def test_a_dead_ones_block_is_for_whoever_comes_next(board: Board) -> None:
    granted(board)
    ((block, _pid),) = board.blocks()
    board.clear(block)
    assert list(board.blocks()) == [] and notes(board) == []
    board.forked()
    posted(board, "next")
    assert [b for b, _pid in board.blocks()] == [block]


def test_a_child_notes_in_a_block_of_its_own(board: Board) -> None:
    granted(board, resource="parent")
    child = os.fork()
    if child == 0:
        try:
            board.forked()
            granted(board, resource="child")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    by_pid = {pid: [n.resource for n in board.notes(block)] for block, pid in board.blocks()}
    assert by_pid == {os.getpid(): ["parent"], child: ["child"]}


def test_a_keeper_that_looks_too_seldom_is_called(board: Board) -> None:
    board.looks_every(0.5)
    granted(board)  # takes a block: that is news
    assert os.read(board.ring, 100)
    posted(board, "long", ttl=10.0)
    with pytest.raises(BlockingIOError):
        os.read(board.ring, 100)
    posted(board, "short", ttl=1.0)
    assert os.read(board.ring, 100)


def test_a_board_for_more_nodes_than_it_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match=f"room for {MAX_NODES} nodes, not 17"):
        Board(17)


def test_the_largest_claim_that_is_allowed_stands_on_the_board(board: Board) -> None:
    """What the keeper cannot read it does not keep."""
    names = checked_names([f"{number:03}" + "n" * 290 for number in range(100)])
    claim = Claim(names, "t" * 500, 10.0, NODES)
    board.post(claim)
    (note,) = (note for block, _pid in board.blocks() for note in board.notes(block))
    assert note.resources == names and note.token == claim.token
    with pytest.raises(ConfigurationError, match=r"at most 30000 bytes together, .* have 31\d\d\d"):
        checked_names([f"{number:03}" + "n" * 310 for number in range(100)])
