"""Planted bugs, for the campaign to find: rules taken out of the library, one at a time.

Loaded by `project.py` alone, in the workers of a campaign that was asked to. A campaign that finds
none of them proves nothing.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from celery import signals

from tests.campaign.worker.oracle import Problem
from tests.campaign.worker.turns import KEPT_OUT, PASSED


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes:
        what: The rule that is missing.
        plant: Takes it out.
        phases: The phases of the nemesis that are likely to show it.
        finds: Words of the problems that must be found, of which one suffices.
        conf: Configuration instead of, or besides, a patch.
        seconds: How long there are faults at most.
    """

    what: str
    plant: Callable[[], None]
    phases: tuple[str, ...]
    finds: tuple[str, ...]
    conf: tuple[tuple[str, Any], ...] = ()
    seconds: float = 120.0

    def is_found(self, problems: Iterable[Problem]) -> bool:
        """Return whether one of these is what must be found ("rule 11" is not "rule 1")."""
        kinds = re.compile("|".join(rf"{re.escape(words)}\b" for words in self.finds))
        return any(kinds.match(problem.kind) for problem in problems)


def plant(name: str) -> None:
    """Take a rule out of the library, in this process and those forked from it."""
    MUTANTS[name].plant()


def _blind_release() -> None:
    from celery_redlock.stores.redis import requests, scripts

    blind = b"""\
local freed = redis.call('DEL', KEYS[1])
redis.pcall('PUBLISH', KEYS[1], '')
return freed"""
    scripts.RELEASE = (blind, blind)
    known, scripts.RELEASE_DIGEST = scripts.RELEASE_DIGEST, hashlib.sha1(blind).hexdigest().encode()
    requests._FREE = requests._FREE.replace(known, scripts.RELEASE_DIGEST)

    from celery_redlock.protocol.round import Verb
    from celery_redlock.stores.postgresql import statements

    release = statements._STATEMENTS[Verb.RELEASE]
    statements._STATEMENTS[Verb.RELEASE] = replace(
        release,
        sql=b"""\
WITH freed AS (
    UPDATE redlock_lease SET until = '-infinity'
    WHERE resource = ANY ($1::text[]) AND concat($2::text, $3::text, $4::float8) <> ''
    RETURNING resource
) SELECT 1 + max(redlock_call(resource)::int) FROM freed""",
    )


def _minority_quorum() -> None:
    from celery_redlock.protocol import values

    right = values.quorum_of
    for name, module in list(sys.modules.items()):
        if name.startswith("celery_redlock") and getattr(module, "quorum_of", None) is right:
            module.quorum_of = lambda nodes: nodes // 2  # type: ignore[attr-defined]


def _free_before_death() -> None:
    """Trust Celery's main process, which reports a death before it happens."""
    from celery.worker.request import Request

    from celery_redlock.keepalive import supervisor

    doomed: set[int] = set()
    is_dead = supervisor._is_dead
    on_timeout, terminate = Request.on_timeout, Request.terminate

    def hasty(pid: int) -> bool:
        return pid in doomed or is_dead(pid)

    def timed_out(self: Any, soft: bool, timeout: float) -> None:
        if not soft:
            doomed.add(self.worker_pid)
        on_timeout(self, soft, timeout)

    def terminated(self: Any, *args: Any, **options: Any) -> None:
        doomed.add(self.worker_pid)
        terminate(self, *args, **options)

    supervisor._pidfd = lambda _pid: None
    supervisor._is_dead = hasty
    Request.on_timeout = timed_out
    Request.terminate = terminated


def _recycled_descriptor() -> None:
    """Judge a child that has just begun by the descriptor of one that has ended."""
    from celery_redlock.keepalive.supervisor import LeaseSupervisor

    judge = LeaseSupervisor._living

    def living(self: Any, ready: set[int]) -> list[tuple[int, int]]:
        judged = judge(self, ready)
        for block, _pid in judged:
            if self._watched.get(block) in ready:
                self._reap(block)
        return judged

    LeaseSupervisor._living = living  # type: ignore[method-assign]


def _endless_extension() -> None:
    """Let a late extension revive a lease, without notifying its holder that it was over."""
    from celery_redlock.protocol.claim import Claim

    Claim._over = lambda self, now: False  # type: ignore[method-assign]


def _leak() -> None:
    """Keep the lock of a task that has failed."""
    from celery_redlock.messages import delivery, endings

    delivery.release_leftovers = lambda: None
    signals.task_failure.disconnect(dispatch_uid="celery_redlock.release.task_failure")
    signals.task_postrun.disconnect(dispatch_uid="celery_redlock.release.task_postrun")

    def release(state: str = "", **signal: Any) -> None:
        if state != "FAILURE":
            endings.release(**signal)

    signals.task_postrun.connect(release, weak=False)


def _swallow() -> None:
    """Never send a task again that met a held lock."""
    from celery.exceptions import Retry

    from celery_redlock.messages import delivery

    def send_again(message: Any, refusal: Exception, attempts: Any, _reason: str = "") -> NoReturn:
        raise Retry(str(refusal), exc=refusal, when=1.0)

    delivery.send_again = send_again


def _kept_token() -> None:
    """Give all attempts of one process the same token; those of one delivery mostly share it."""
    from celery_redlock.protocol.values import Owner

    token = Owner.token

    def kept(self: Owner, nonce: str, now: float = 0.0) -> str:
        process = replace(self, task_id="", retries=0, stamp="", task="")
        return token(process, "0" * 32, 0.0)

    Owner.token = kept  # type: ignore[method-assign]


def _counted_from_the_answer() -> None:
    from celery_redlock.protocol.claim import Claim

    acknowledged = Claim.acknowledged

    def late(self: Claim, node: int, sent: float, now: float) -> None:
        acknowledged(self, node, now, now)

    Claim.acknowledged = late  # type: ignore[method-assign]


def _not_undone() -> None:
    from celery_redlock.protocol import quorum

    def undo(claim: Any, now: float, nodes: Any = None) -> Any:
        claim.ended = True
        yield from ()

    quorum.undo = undo


def _no_doubt() -> None:
    from celery_redlock.protocol.restart_guard import RestartGuard

    RestartGuard.doubt = lambda self, *args: ""  # type: ignore[method-assign]


def _dawdle() -> None:
    """Acquire slowly."""
    from celery_redlock.protocol import quorum

    acquire = quorum.acquire

    def slowly(*args: Any) -> Any:
        time.sleep(1.5)
        return (yield from acquire(*args))

    quorum.acquire = slowly


def _wide_window() -> None:
    """Widen the prefetch window for parked messages, and never narrow it."""
    from kombu.common import QoS

    QoS.decrement_eventually = lambda self, n=1: self.value


def _writer_among_readers() -> None:
    """Let a writer without a fencing token take the place of readers."""
    from celery_redlock.protocol.round import Verb
    from celery_redlock.stores.redis import requests, scripts

    acquire = requests._acquire
    blind = b"""\
if type(redis.pcall('ZCARD', KEYS[1])) == 'number' then redis.call('DEL', KEYS[1]) end
"""

    def acquires(claims: Any, prefix: str, plain: bool) -> bytes:
        claim = claims[0]
        if claim.proposal is not None or requests.is_shared(claim.token):
            return acquire(claims, prefix, plain)
        values = requests._bytes(claim.token), requests._milliseconds(claim.ttl)
        return requests._eval(blind + scripts.ACQUIRE, requests._keys(claims, prefix), *values)

    requests._REQUESTS[Verb.ACQUIRE] = acquires


def _readers_see(here: bytes, instead: bytes) -> None:
    """Change the scripts of those that ask as readers."""
    from celery_redlock.stores.redis import scripts

    assert here in scripts.ACQUIRE_SHARED, here
    scripts.ACQUIRE_SHARED = scripts.ACQUIRE_SHARED.replace(here, instead)
    scripts.PEEK_SHARED = scripts.PEEK_SHARED.replace(here, instead)


def _reader_beside_writer() -> None:
    """Count the answer of a node that has a writer as a reader's yes."""
    barred = b"if held then return held end"
    _readers_see(barred, b"if type(held) == 'string' and held ~= token then return false end")


def _rude_readers() -> None:
    """Let readers pass a writer that waits."""
    _readers_see(b"PUBSUB', 'NUMSUB', process)[2] ~= 0", b"PUBSUB', 'NUMSUB', process)[2] == -1")


def _shy_readers() -> None:
    """Let a worker wait for its readers as if they were writers."""
    from celery_redlock.worker.parking.admission import AdmissionQueue

    AdmissionQueue.is_shared = lambda _self, _resources: False  # type: ignore[method-assign]


def _nothing() -> None: ...


WITHIN = ("overlap within both validities",)
MUTANTS: dict[str, Mutant] = {
    "blind-release": Mutant("the token is compared before a key is deleted", _blind_release,
        ("sleepers",), WITHIN),
    "minority-quorum": Mutant("more than half of the nodes are a quorum", _minority_quorum,
        ("nodes",), WITHIN),
    "free-before-death": Mutant(
        "what a child held is freed when it is dead, not when it is to die", _free_before_death,
        # Rule 7 where the next body began after the child was dead, as on a busy machine.
        ("endings",), ("trace, rule 7", *WITHIN)),
    "recycled-descriptor": Mutant("what a child holds is not freed when another has died",
        # Rule 1 where it was freed before its child could note that it had asked.
        _recycled_descriptor, ("endings",), ("trace, rule 7", "trace, rule 1", *WITHIN),
        (("worker_max_tasks_per_child", 1),)),
    "guard-off": Mutant("a node that forgot has no vote for a ttl", _nothing, ("memory",), WITHIN,
        (("redlock_restart_guard", "off"),)),
    "endless-extension": Mutant("a lease that has reached its deadline is over", _endless_extension,
        ("majority",), ("not told", "untrue", *WITHIN)),
    "leak": Mutant("a lock is freed at every ending", _leak, ("processes",), ("not freed", "key")),
    "kept-token": Mutant("a token is used for one attempt", _kept_token, ("nodes",),
        ("trace, rule 1",), seconds=10.0),
    "counted-late": Mutant("a lease is counted from before it was asked for",
        _counted_from_the_answer, ("nodes",), ("trace, rule 3",), seconds=10.0),
    "not-undone": Mutant("an attempt that fails is undone", _not_undone, ("nodes",),
        ("trace, rule 8",), seconds=15.0),
    "no-doubt": Mutant("a node that has just started has no vote", _no_doubt, ("memory",),
        ("trace, rule 5",), seconds=15.0),
    "dawdle": Mutant("a key that is free and wanted is taken within a second", _dawdle, ("nodes",),
        ("a key is free and wanted",), seconds=30.0),
    "wide-window": Mutant("the prefetch window at rest is what it was at the start", _wide_window,
        ("nodes", "later"), ("prefetch",), seconds=12.0),
    "writer-among-readers": Mutant("a writer does not enter while others read",
        _writer_among_readers, ("reading",), WITHIN, seconds=20.0),
    "reader-beside-writer": Mutant("a reader does not enter while another writes",
        _reader_beside_writer, ("reading",), WITHIN, seconds=30.0),
    "rude-readers": Mutant("new readers let a writer pass that waits", _rude_readers,
        ("reading",), (PASSED,)),
    "shy-readers": Mutant("a reader that waits goes when no writer does", _shy_readers,
        ("reading",), (KEPT_OUT,)),
    "swallow": Mutant("a task that waits is not lost", _swallow, ("nodes",), ("message",),
        seconds=15.0),
}  # fmt: skip
