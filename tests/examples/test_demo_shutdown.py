"""A signal ends the demonstration at once, but never while a process is being started."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from celery_redlock.demo import shutdown


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in shutdown.SIGNALS}
    shutdown.leave_on_signals()
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.mark.parametrize("name", shutdown.SIGNALS)
def test_a_signal_unwinds_the_stack_and_says_so_in_the_exit_code(name: signal.Signals) -> None:
    with pytest.raises(SystemExit) as exit_:
        signal.raise_signal(name)
    assert exit_.value.code == 128 + name


def test_in_a_deferred_block_it_waits_for_the_end() -> None:
    started = []
    with pytest.raises(SystemExit) as exit_:  # noqa: SIM117
        with shutdown.deferred():
            signal.raise_signal(signal.SIGTERM)
            started.append("the process whose pid is noted")
    assert started
    assert exit_.value.code == 128 + signal.SIGTERM


def test_a_second_signal_does_not_disturb_the_removal() -> None:
    removed = []
    with pytest.raises(SystemExit):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            removed.append("everything")
    assert removed


def test_a_block_without_a_signal_ends_as_it_would() -> None:
    with shutdown.deferred():
        pass
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGINT)
