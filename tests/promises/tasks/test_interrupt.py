"""A body whose lease is lost is interrupted; the code after the body never is."""

from __future__ import annotations

import dis
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import pytest

from celery_redlock import LeaseLost
from celery_redlock.runtime import interrupt
from celery_redlock.runtime.interrupt import SIGNAL, Interruptible, _blocks
from tests.support.names import Patch

RACES = 1000


def loss() -> LeaseLost:
    return LeaseLost("the one that says what was lost", resource="r", reason="refused")


@pytest.fixture(autouse=True)
def _signal_handler() -> Iterator[None]:
    before = signal.getsignal(SIGNAL)
    yield
    Interruptible(loss).run(lambda: None)
    assert _blocks == []
    signal.signal(SIGNAL, before)


def spin(limit: float = 5.0) -> None:
    """Execute bytecode until an interrupt comes."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        pass
    pytest.fail("nothing struck")


def in_main(work: Callable[[], None]) -> None:
    assert threading.current_thread() is threading.main_thread()
    work()


def in_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def both(test: Callable[[], None]) -> Callable[..., None]:
    """Run a test in the main thread, and in another."""

    @pytest.mark.parametrize("where", [in_main, in_thread])
    def run(where: Callable[..., None]) -> None:
        where(test)

    return run


def strike(block: Interruptible) -> None:
    """By another thread, soon; not while that is started, of which `threading` makes a KeyError."""
    go = threading.Event()
    threading.Thread(target=lambda: go.wait(20.0) and block.interrupt()).start()
    go.set()


def a_while() -> None:
    """Wait for a moment in which an interrupt would show."""
    for _ in range(1000):
        pass


def raising(error: BaseException | None) -> Callable[[], None]:
    def body() -> None:
        if error is not None:
            raise error

    return body


@both
def test_body_whose_lease_is_lost_is_interrupted() -> None:
    block = Interruptible(loss)
    with pytest.raises(LeaseLost) as raised:
        block.run(lambda: (strike(block), spin()))
    assert raised.value.resource == "r"
    assert raised.value.reason == "refused"
    assert "the one that says" in str(raised.value)


@both
def test_interrupted_body_can_read_the_reason_of_the_loss() -> None:
    block = Interruptible(loss)

    def body() -> str:
        try:
            strike(block)
            spin()
        except LeaseLost as error:
            assert (error.resource, error.reason) == ("r", "refused")
            assert type(pickle.loads(pickle.dumps(error))) is LeaseLost
            return str(error)
        return ""

    assert "the one that says" in block.run(body)


def test_sleeping_body_is_interrupted_though_the_first_signal_comes_too_early(
    monkeypatch: Patch,
) -> None:
    sent: list[int] = []
    kill = signal.pthread_kill

    def lost_once(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", lost_once)
    block = Interruptible(loss)
    begin = time.monotonic()
    with pytest.raises(LeaseLost):
        block.run(lambda: (strike(block), threading.Event().wait(20.0)))
    assert time.monotonic() - begin < 5.0


def test_exception_sent_to_a_thread_too_late_is_taken_back(monkeypatch: Patch) -> None:
    sent: list[type[BaseException]] = []
    send = interrupt._raise_in

    def late(thread: int, kind: type[BaseException]) -> None:
        sent.append(kind)
        if kind is interrupt._Nothing:
            send(thread, kind)

    def work() -> None:
        block = Interruptible(loss)
        block.run(block.interrupt)

    monkeypatch.setattr(interrupt, "_raise_in", late)
    in_thread(work)
    assert issubclass(sent[0], LeaseLost) and sent[1:] == [interrupt._Nothing]


@both
def test_body_whose_lease_is_already_lost_is_not_begun() -> None:
    block = Interruptible(loss)
    block.interrupt()
    with pytest.raises(LeaseLost, match="the one that says"):
        block.run(lambda: pytest.fail("it was begun"))


@both
def test_interrupt_after_the_end_of_a_body_does_nothing() -> None:
    block = Interruptible(loss)
    assert block.run(lambda: 5) == 5
    block.interrupt()
    a_while()


@both
def test_body_that_catches_its_interrupt_is_not_interrupted_again() -> None:
    block = Interruptible(loss, lambda: True)

    def body() -> str:
        with pytest.raises(LeaseLost):
            strike(block)
            spin()
        block.interrupt()
        a_while()
        return "went on"

    assert block.run(body) == "went on"


@both
def test_interrupt_of_an_inner_body_does_not_end_the_outer_one() -> None:
    outer, inner = Interruptible(loss), Interruptible(loss)

    def body() -> str:
        with pytest.raises(LeaseLost):
            inner.run(lambda: (strike(inner), spin()))
        a_while()
        return "went on"

    assert outer.run(body) == "went on"


@both
def test_interrupt_of_an_outer_body_ends_the_inner_one_too() -> None:
    outer, inner = Interruptible(loss), Interruptible(lambda: pytest.fail("not this one's"))
    with pytest.raises(LeaseLost, match="the one that says"):
        outer.run(lambda: inner.run(lambda: (strike(outer), spin())))


@both
def test_error_of_the_body_itself_is_not_replaced_by_a_loss() -> None:
    for own in (KeyError("own"), LeaseLost("of another lock", resource="other"), LeaseLost()):
        with pytest.raises(type(own)) as raised:
            Interruptible(loss).run(raising(own))
        assert raised.value is own


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="traces no bytecode before it has run; the races remain"
)
@both
def test_interrupt_at_any_bytecode_ends_the_body_properly_or_not_at_all() -> None:
    """From before the body to after it: ended properly, if at all, and never once it is left."""
    for own in (None, LeaseLost("own", resource="own")):
        outcomes = []
        number, reached = 0, True
        while reached:
            outcome, reached = struck_at(number, own)
            outcomes.append(outcome)
            number += 1
        assert outcomes[-1] == "not struck"
        assert outcomes.count("struck") > 10


def struck_at(number: int, own: BaseException | None) -> tuple[str, bool]:
    """Run a body, struck at the n-th bytecode; what became of it, and if it was."""
    # New code, because Python specialises code that has run often, which hides it from a tracer.
    methods = {name: anew(getattr(Interruptible, name)) for name in ("run", "_enter", "_leave")}
    block = type("Traced", (Interruptible,), methods)(loss)
    body = anew(raising(own))
    codes = [function.__code__ for function in (*methods.values(), body)]
    count = -1
    place = None

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count, place
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        # Where the guard is taken, the watchdog's thread would have to wait for us; at a NOP the
        # interpreter looks for nothing.
        nop = frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]
        if event == "opcode" and not nop and not block._guard.locked():
            count += 1
            if count == number:
                place = frame.f_code.co_name, frame.f_lineno
                block.interrupt()
                for _ in range(100):  # it may take another thread to deliver it
                    time.sleep(0)
        return trace

    error: BaseException | None = None
    before = sys.gettrace()  # that of coverage, say
    sys.settrace(trace)
    try:
        next(apart(lambda: block.run(body)))
    except (KeyError, LeaseLost) as raised:
        error = raised
    finally:
        sys.settrace(before)
    try:
        for _ in range(100):
            time.sleep(0)
    except LeaseLost:
        pytest.fail(f"struck after the body had ended, by a strike at {place}")
    assert not any(block._inside for block in _blocks), f"struck at {place}"
    assert not block._guard.locked()
    assert sys.exc_info() == (None, None, None), f"struck at {place}"
    if error is own:
        return "not struck", count >= number
    assert isinstance(error, LeaseLost)
    assert error.reason == "refused", f"struck at {place}"
    return "struck", count >= number


def apart(call: Callable[[], object]) -> Iterator[object]:
    """Call something with an exception state of its own, as a generator has it.

    Python 3.11 leaves the error that was being handled in the thread's state if a strike comes at
    one certain bytecode: it would be the context of every later error in this process.
    """
    yield call()


def anew(function: Any) -> Any:
    code, closure = function.__code__.replace(), function.__closure__
    return FunctionType(code, function.__globals__, closure=closure)


@both
def test_interrupt_that_races_with_the_end_of_a_body_strikes_nothing_after_it() -> None:
    """The same with threads that really run at once; many times, by chance."""

    def race(number: int) -> bool:
        block = Interruptible(loss)
        struck = False
        go = threading.Event()

        def strike() -> None:
            go.wait(5.0)
            for _ in range(number % 37):
                pass
            block.interrupt()

        def body() -> None:
            go.set()
            for _ in range(number % 50 * 400):
                pass

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            block.run(body)
        except LeaseLost as error:
            struck = True
            assert error.reason == "refused"
        try:
            thread.join()
            for _ in range(200):
                pass
        except LeaseLost:
            pytest.fail(f"struck after the body had ended, in race {number}")
        return struck

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        struck = sum(race(number) for number in range(RACES))
        assert 0 < struck < RACES, "no race was run: this proves nothing"
    finally:
        sys.setswitchinterval(interval)


class Greenlet:
    """The body's, as a strike sees it: it is thrown into when the hub runs."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.calls: list[Callable[[], None]] = []
        self.thrown: list[LeaseLost] = []
        monkeypatch.setattr(interrupt, "current", lambda: self)
        monkeypatch.setattr(interrupt, "in_hub", self.calls.append)

    def throw(self, error: LeaseLost) -> None:
        self.thrown.append(error)

    def hub_runs(self) -> None:
        while self.calls:
            self.calls.pop(0)()


@pytest.mark.parametrize("when", ["before", "inside", "at its end"])
def test_greenlet_is_interrupted_once_when_it_waits(monkeypatch: Patch, when: str) -> None:
    greenlet = Greenlet(monkeypatch)
    block = Interruptible(loss)
    begun = []

    def body() -> None:
        begun.append(True)
        block.interrupt()
        assert greenlet.thrown == []  # it runs, and so no other may be struck for it
        if when == "inside":
            greenlet.hub_runs()
        block.interrupt()

    if when == "before":
        block.interrupt()
        with pytest.raises(LeaseLost):
            block.run(body)
    else:
        block.run(body)
    greenlet.hub_runs()
    assert bool(begun) == (when != "before")
    assert [error.reason for error in greenlet.thrown] == ["refused"] * (when == "inside")


@both
def test_body_that_returns_after_its_lease_ended_unnoticed_ends_with_the_loss() -> None:
    """It may be a C call that kept the GIL: no thread could look at the clock or interrupt it."""

    with pytest.raises(LeaseLost, match="the one that says"):
        Interruptible(loss, lambda: True).run(lambda: 5)
    assert Interruptible(loss, lambda: False).run(lambda: 5) == 5
    with pytest.raises(KeyError):
        Interruptible(loss, lambda: True).run(raising(KeyError("own")))
