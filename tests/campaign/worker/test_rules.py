"""A trace of each bug, made by hand, is rejected by the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.journal import Process
from tests.campaign.worker.rules import RULES, check, text_of
from tests.campaign.worker.tracing import Event

A, B, MAIN = Process("a", 10, 11, "1"), Process("b", 20, 21, "2"), Process("a", 10, 10, "3")
TTL = 2.0
DRIFT = 0.01 * TTL + 0.002
Trace = list[tuple[Process, Event]]


def claims(token: str, resource: str = "f1") -> tuple[tuple[str, str, float], ...]:
    return ((token, resource, TTL),)


def asked(
    who: Process, verb: str, token: str, at: float, nodes: tuple[int, ...] = (0, 1, 2)
) -> Trace:
    return [
        (who, Event(at, "ask", node, verb=verb, sent=at, claims=claims(token))) for node in nodes
    ]


def heard(
    who: Process, verb: str, token: str, sent: float, at: float, votes: str = "yyy", **more: Any
) -> Trace:
    """Return answers, a letter a node: yes, no, silent; a dot has not answered."""
    words = {"y": "yes", "n": "no", "s": "silent"}
    outcomes = {"extend": "1", "renew": "1"}.get(verb, "")
    return [
        (
            who,
            Event(
                at, "hear", node, verb=verb, sent=sent, now=at, claims=claims(token),
                vote=words[vote], outcomes=outcomes, **more,
            ),
        )
        for node, vote in enumerate(votes)
        if vote != "."
    ]  # fmt: skip


def granted(who: Process, token: str, at: float, deadline: float) -> Trace:
    return [(who, Event(at, "grant", now=at, claims=claims(token), deadline=deadline))]


def deadline(who: Process, token: str, at: float, until: float) -> Trace:
    return [(who, Event(at, "deadline", claims=claims(token), deadline=until))]


def lease(who: Process, token: str, at: float) -> Trace:
    """Return the events of a lease that is requested, and granted 0.1 s later."""
    return [
        *asked(who, "acquire", token, at),
        *heard(who, "acquire", token, at, at + 0.1),
        *granted(who, token, at + 0.1, at + TTL - DRIFT),
    ]


def broken(*parts: Trace, **more: Any) -> list[int]:
    traces: dict[Process, list[Event]] = {}
    for part in parts:
        for who, event in part:
            traces.setdefault(who, []).append(event)
    return sorted({breach.rule for breach in check(traces, 3, **more)})


END = asked(MAIN, "peek", "nobody", 100.0)
"""An event late enough for everything before it to have had its time."""


def test_rules_accept_a_lease_extended_and_released() -> None:
    trace = [
        *lease(A, "t", 1.0),
        *asked(A, "extend", "t", 1.7),
        *heard(A, "extend", "t", 1.7, 1.8),
        *deadline(A, "t", 1.8, 1.7 + TTL - DRIFT),
        *asked(A, "release", "t", 2.0),
        *heard(A, "release", "t", 2.0, 2.1),
        *lease(B, "u", 2.2),
    ]
    assert broken(trace, END) == []


def _two_attempts() -> Trace:
    again = [*asked(A, "acquire", "t", 1.5), *heard(A, "acquire", "t", 1.5, 1.6)]
    return [*asked(A, "acquire", "t", 1.0), *asked(A, "undo", "t", 1.2), *again]


def _behind_its_release(verb: str) -> Trace:
    return [*lease(A, "t", 1.0), *asked(A, "release", "t", 1.5), *asked(A, verb, "t", 1.6)]


def _out_of_order() -> Trace:
    first, second = asked(A, "peek", "t", 1.0), asked(A, "peek", "u", 1.1)
    late = [*heard(A, "peek", "u", 1.1, 1.2), *heard(A, "peek", "t", 1.0, 1.3)]
    return [*first, *second, *late]


def _revived() -> Trace:
    """Return an extension whose answers come when the lease is over."""
    over = 1.0 + TTL - DRIFT
    return [
        *lease(A, "t", 1.0),
        *asked(A, "extend", "t", 1.7),
        *heard(A, "extend", "t", 1.7, over + 0.1),
        *deadline(A, "t", over + 0.1, 1.7 + TTL - DRIFT),
    ]


def _met(run: str, at: float, uptime: float) -> Trace:
    return [(A, Event(at, "met", n, now=at, run=run, uptime=uptime)) for n in range(3)]


def _grant_counted_from_the_answer() -> Trace:
    asks = [*asked(A, "acquire", "t", 1.0), *heard(A, "acquire", "t", 1.0, 1.1)]
    return [*asks, *granted(A, "t", 1.1, 1.1 + TTL - DRIFT)]


def _minority() -> Trace:
    asks = [*asked(A, "acquire", "t", 1.0), *heard(A, "acquire", "t", 1.0, 1.1, "ynn")]
    return [*asks, *granted(A, "t", 1.1, 1.0 + TTL - DRIFT)]


def _not_undone() -> Trace:
    later = [*asked(A, "peek", "u", 2.0), *heard(A, "peek", "u", 2.0, 2.1)]
    asks = [*asked(A, "acquire", "t", 1.0), *heard(A, "acquire", "t", 1.0, 1.1, "ynn")]
    return [*asks, *asked(A, "undo", "t", 1.2, (1, 2)), *later]


BUGS: list[tuple[int, Callable[[], Trace]]] = [
    (1, _two_attempts),
    (1, lambda: [*asked(A, "acquire", "t", 1.0), *asked(B, "acquire", "t", 1.5)]),
    (2, _minority),
    (3, _grant_counted_from_the_answer),
    (3, lambda: [*lease(A, "t", 1.0), *deadline(A, "t", 1.5, 9.0)]),
    (4, _revived),
    (5, lambda: [*asked(A, "acquire", "t", 1.0),
                 *heard(A, "acquire", "t", 1.0, 1.1, doubt=True)]),
    (5, lambda: [*_met("r", 1.0, 0.0), *lease(A, "t", 1.1)]),
    (5, lambda: [*_met("r", 1.0, 99.0), *heard(A, "peek", "x", 4.0, 4.1),
                 *_met("other", 4.5, 50.0), *lease(A, "t", 4.6)]),
    (6, lambda: _behind_its_release("extend")),
    (6, lambda: _behind_its_release("acquire")),
    (7, lambda: asked(A, "release", "t", 1.0)),
    (7, lambda: [*lease(A, "t", 1.0), *asked(B, "release", "t", 1.5)]),
    (7, lambda: [*lease(A, "t", 1.0), *asked(MAIN, "release", "t", 1.5)]),
    (8, _not_undone),
    (9, lambda: [*asked(A, "acquire", "t", 1.0), *asked(A, "extend", "t", 1.1),
                 *asked(A, "undo", "t", 1.2)]),
    (10, _out_of_order),
    (11, lambda: [*lease(A, "t", 1.0), *lease(B, "u", 1.5)]),
    (11, lambda: [*lease(A, "t~", 1.0), *lease(B, "u", 1.5)]),
    (11, lambda: [*lease(A, "t", 1.0), *lease(B, "u~", 1.5)]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "bug"), BUGS)
def test_rules_reject_a_trace_of_each_bug(rule: int, bug: Callable[[], Trace]) -> None:
    assert rule in broken(bug(), END)


def test_every_rule_has_a_bug_that_breaks_it() -> None:
    assert {rule for rule, _bug in BUGS} == set(RULES)


def test_rules_accept_traces_one_step_from_a_bug() -> None:
    """Each of these is one step from a bug above."""
    peek = heard(A, "peek", "x", 4.0, 4.1)
    late = [*_met("r", 1.0, 99.0), *peek, *_met("other", 4.5, 50.0), *lease(A, "t", 6.2)]
    assert broken(late, END) == []
    stepped = [*_met("r", 1.0, 99.0), *_met("r", 2.0, 0.0), *lease(A, "t", 2.1)]
    assert broken(stepped, END) == []
    parent = [(MAIN, event) for _a, event in _met("r", 1.0, 99.0)]
    assert broken([*parent, *_met("r", 2.0, 0.0), *lease(A, "t", 2.1)], END) == []
    assert broken([*_met("r", 1.0, 0.0), *lease(A, "t", 1.1)], END, guard=False) == []
    silent = heard(A, "acquire", "t", 1.0, 1.1, "sss", doubt=True)
    undone = [*asked(A, "acquire", "t", 1.0), *silent, *asked(A, "undo", "t", 1.2)]
    assert broken(undone, END) == []
    freed = [*lease(A, "t", 1.0), *asked(MAIN, "release", "t", 1.5), *lease(B, "u", 1.6)]
    assert broken(freed, END, died={A: 1.4}) == []
    unwritten = asked(MAIN, "release", "t", 1.5)  # of a child that was killed as it asked
    assert broken(unwritten, END, died={A: 1.4}) == []
    assert broken(unwritten, END, died={A: 0.4}) == [7]
    again = asked(MAIN, "release", "t", 9.0)  # its node was away
    assert broken([*unwritten, *again], END, died={A: 1.4}) == []
    assert broken([*lease(A, "t~", 1.0), *lease(B, "u~", 1.5)], END) == []  # they read
    apart = [*lease(A, "t", 1.0), *lease(B, "u", 1.0 + TTL)]
    assert broken(apart, END) == []
    flushed = [Fault("FLUSHALL", 1.3, 1.3, nodes=(0,))]
    assert broken([*lease(A, "t", 1.0), *lease(B, "u", 1.5)], END, faults=flushed) == []
    young = Process("c", 30, 31, "140")
    swapped = [Fault("node swapped", 1.2, 1.45, nodes=(2, 3, 4))]
    unknown = [*lease(A, "t", 1.0), *lease(young, "u", 1.5)]
    assert broken(unknown, END, faults=swapped) == []
    assert broken(unknown, END) == [11]
    known = [*lease(A, "t", 1.0), *lease(B, "u", 1.5)]
    assert broken(known, END, faults=swapped) == [11]


def test_rules_count_an_extension_by_the_supervisor_for_the_holder() -> None:
    """The main process extends the child's lease, and the child learns of it."""
    kept = [
        *lease(A, "t", 1.0),
        *asked(MAIN, "renew", "t", 1.7),
        *heard(MAIN, "renew", "t", 1.7, 1.8),
        *deadline(A, "t", 1.9, 1.7 + TTL - DRIFT),
    ]
    assert broken(kept, END) == []
    assert broken([*kept, *deadline(A, "t", 1.9, 1.8 + TTL - DRIFT)], END) == [3]


def test_rules_do_not_count_a_refused_extension() -> None:
    refused = [
        (who, event._replace(outcomes="0", vote="no"))
        for who, event in heard(A, "extend", "t", 1.7, 1.8)
    ]
    trace = [*lease(A, "t", 1.0), *asked(A, "extend", "t", 1.7), *refused]
    assert broken([*trace, *deadline(A, "t", 1.8, 1.7 + TTL - DRIFT)], END) == [3]


def test_breaches_of_rules_are_printed_for_people() -> None:
    traces: dict[Process, list[Event]] = {}
    for who, event in [*lease(A, "t", 1.0), *lease(B, "u", 1.5)]:
        traces.setdefault(who, []).append(event)
    breaches = check(traces, 3)
    assert text_of(breaches) == "1 x rule 11"
    assert text_of([]) == "none broken"
    assert "of one resource no lease is granted" in str(breaches[0])
