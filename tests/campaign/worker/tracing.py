"""Tracing of workers' requests, answers and conclusions, which `rules.py` judges.

It is put around the library from outside, in the workers of a campaign alone: the library has no
part in it, and no cost. One line an event, in a file a process, as in `journal.py`; tokens are
written as digests. If internal names of the library change, `install` fails with an error.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaign.worker.journal import Pen, Process, process_of, short


class Event(NamedTuple):
    """A line of a trace.

    Attributes:
        at: When it was written; seconds.
        kind: `ask`, `hear`, `grant`, `deadline`, `lost`, `met`.
        node: Which node, by its index; -1 where none is meant.
        link: Which connection to it: a process has one a driver.
        verb: What is asked.
        sent: When the round was made: what leases are counted from; seconds.
        now: The time by which the library judged; seconds.
        claims: Of each claim: the token's digest (a reader's ends in ~), its resource, its ttl.
        vote: What it was taken for: "yes", "no", "silent"; of `lost`: why.
        doubt: Whether the library doubted the node's memory.
        outcomes: Of an extension, a character a claim: "1" renewed, "2" set again, "0" refused.
        deadline: Until when the lease is held now; seconds.
        run: Of `met`: a digest of the server's run; empty if it did not say.
        uptime: For how long that had been up; seconds, whole ones.
    """

    at: float
    kind: str
    node: int = -1
    link: int = 0
    verb: str = ""
    sent: float = 0.0
    now: float = 0.0
    claims: tuple[tuple[str, str, float], ...] = ()
    vote: str = ""
    doubt: bool = False
    outcomes: str = ""
    deadline: float = 0.0
    run: str = ""
    uptime: float = 0.0

    @property
    def round(self) -> tuple[str, float, str]:
        """Names the round it is of, in its process."""
        return self.verb, self.sent, self.claims[0][0] if self.claims else ""


def install() -> None:
    """Write a trace from now on, in this process and those forked from it."""
    from celery_redlock.protocol.claim import Claim
    from celery_redlock.protocol.pipeline import Pipeline
    from celery_redlock.protocol.round import Round
    from celery_redlock.protocol.texts import shown
    from celery_redlock.protocol.values import is_shared
    from celery_redlock.stores.node import Node

    path = os.path.join(os.environ["TEST_JOURNAL"], "trace")
    os.makedirs(path, exist_ok=True)
    pen = Pen(path, os.environ["TEST_WORKER"])

    def claims(of: Any) -> list[tuple[str, str, float]]:
        # A question has no token, and an entry of a wait queue no ttl.
        tokens = [getattr(it, "token", "") for it in of]
        return [
            (short(token) + "~" * is_shared(token), shown(it.resources), getattr(it, "ttl", 0.0))
            for it, token in zip(of, tokens, strict=True)
        ]

    def write(kind: str, **fields: Any) -> None:
        pen.write(kind, "", fields)

    def after(cls: Any, name: str, then: Callable[..., None]) -> None:
        """Have `then` called after a method of the library, with its result ahead of all else."""
        method = getattr(cls, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            then(result, self, *args, **kwargs)
            return result

        setattr(cls, name, wrapped)

    def of(round_: Any) -> dict[str, Any]:
        return {"verb": round_.verb.word, "sent": round_.sent, "claims": claims(round_.claims)}

    numbers = itertools.count(1)
    hearing = threading.local()

    def link(channel: Any) -> int:
        if not hasattr(channel, "trace_link"):
            channel.trace_link = next(numbers)
        return int(channel.trace_link)

    def written(_result: None, channel: Any, round_: Any) -> None:
        write("ask", node=channel.node, link=link(channel), **of(round_))

    answer = Round.answer

    def heard(round_: Any, node: int, reply: Any, now: float, *more: Any, **named: Any) -> None:
        """Write the answer first, and its consequences behind it."""
        hearing.then = then = []
        try:
            answer(round_, node, reply, now, *more, **named)
        finally:
            hearing.then = None
        doubt = named.get("doubt", more[0] if more else "")
        vote = round_.votes[node]
        extending = round_.verb.word in ("extend", "renew")
        write(
            "hear", node=node, now=now, vote=vote.value if vote else "", doubt=bool(doubt),
            outcomes=reply if extending else "", **of(round_),
        )  # fmt: skip
        for kind, fields in then:
            write(kind, **fields)

    def conclude(kind: str, **fields: Any) -> None:
        then = getattr(hearing, "then", None)
        if then is None:
            write(kind, **fields)
        else:
            then.append((kind, fields))

    def granted(result: bool, claim: Any, now: float) -> None:
        if result:
            write("grant", now=now, claims=claims([claim]), deadline=claim.deadline)

    def met(
        _result: None, node: Any, _connection: Any, facts: Any, now: float, *_more: Any
    ) -> None:
        run = short(facts.run_id) if facts.run_id else ""
        write(
            "met", node=node.index, link=link(node.channel), now=now, run=run,
            uptime=facts.uptime or 0.0,
        )  # fmt: skip

    count, lose = Claim._count, Claim.lose

    def counted(claim: Any) -> None:
        before = claim.deadline
        count(claim)
        if claim.granted_at is not None and claim.deadline != before:
            conclude("deadline", claims=claims([claim]), deadline=claim.deadline)

    def lost(claim: Any, reason: str) -> None:
        if claim.lost is None:
            conclude("lost", claims=claims([claim]), vote=reason, deadline=claim.deadline)
        lose(claim, reason)

    after(Pipeline, "_written", written)
    Round.answer = heard  # type: ignore[method-assign]
    after(Claim, "grant", granted)
    after(Node, "opened", met)
    Claim._count = counted  # type: ignore[method-assign]
    Claim.lose = lost  # type: ignore[method-assign]


def read(path: Path) -> dict[Process, list[Event]]:
    """The traces of all processes of a campaign."""
    found: dict[Process, list[Event]] = {}
    for file in sorted(path.glob("*.log")):
        events = found.setdefault(process_of(file), [])
        for text in file.read_bytes().splitlines():
            try:
                at, kind, _thread, _task, fields = json.loads(text)
            except ValueError:
                continue  # killed in the midst of a line
            fields["claims"] = tuple(map(tuple, fields.get("claims", ())))
            events.append(Event(at, kind, **fields))
    return found
