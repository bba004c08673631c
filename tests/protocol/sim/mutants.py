"""Planted bugs: rules taken out of the production code, one at a time. Each must be found.

A simulator that finds none of them proves nothing. Most mutants patch the production object itself;
where the rule lives in the part of production that the world stands in for (a script in `node.py`,
the loop of `driver.py`, the clean-up in `redlock.py`), they patch its mirror in the world.

Two of them break no rule but a premise (`premise`): there the lock is known to fail, and the run
shows that it does, and that the invariants would see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from celery_redlock.keepalive import watchdog
from celery_redlock.protocol import claim as claims
from celery_redlock.protocol import lease, quorum
from celery_redlock.protocol import round as rounds
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.pipeline import Pipeline
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.protocol.values import Owner, Vote
from celery_redlock.testing.fakes import FakeNode
from tests.protocol.sim import actor_mutants, fence_mutants, several_mutants, shared_mutants
from tests.protocol.sim.swarm import CHANGED, LIMITS, SEVERAL, SHARED
from tests.protocol.sim.world.plan import Fault, Knobs
from tests.protocol.sim.world.process import Process

Patches = Callable[[], list[Any]]
Twist = Callable[[Knobs, list[Fault]], tuple[Knobs, list[Fault]]]


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes:
        what: The rule that is missing.
        patches: What to patch, for `mock.patch.object`.
        twist: Changes the world that a seed has drawn, or None.
        premise: It breaks a premise of the algorithm rather than a rule of the code.
        seed: One that is known to show it.
        invariants: Those that may see it.
        overlap: A seed at which two hold the same lock at once, where one is known.
    """

    what: str
    patches: Patches = list
    twist: Twist | None = None
    premise: bool = False
    seed: int = 0
    invariants: tuple[str, ...] = ("I1",)
    overlap: int | None = None


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The code with one bug in it."""
    with ExitStack() as stack:
        for target, name, value in mutant.patches():
            stack.enter_context(mock.patch.object(target, name, value))
        yield


# -- The patches


def _blind_release() -> list[Any]:
    def delete(self: FakeNode, claim: Claim, name: str, token: str | None) -> bool:
        if token is None:
            return False
        del self.held[name]
        if self.witness is not None:
            self.witness(name, token, None, claim)
        return True

    return [(FakeNode, "_delete", delete)]


def _overwriting_acquire() -> list[Any]:
    execute = FakeNode.execute

    def careless(self: FakeNode, verb: Verb, claims: Any, now: float) -> Any:
        if verb is not Verb.ACQUIRE:
            return execute(self, verb, claims, now)
        for name in claims[0].resources:
            self._set(claims[0], name, self.token(name, now), now)
        return None

    return [(FakeNode, "execute", careless)]


def _minority_quorum() -> list[Any]:
    def half(nodes: int) -> int:
        return max(1, nodes // 2)

    return [(rounds, "quorum_of", half), (claims, "quorum_of", half)]


def _counted_from_the_answer() -> list[Any]:
    acknowledged = Claim.acknowledged

    def late(self: Claim, node: int, sent: float, now: float) -> None:
        acknowledged(self, node, now, now)

    return [(Claim, "acknowledged", late)]


def _token_kept() -> list[Any]:
    token = Owner.token

    def same(self: Owner, nonce: str) -> str:
        return token(self, "always")

    return [(Owner, "token", same)]


def _old_deadline_ignored() -> list[Any]:
    def held(self: Claim, now: float) -> bool:
        return self.granted_at is not None and not self.ended and now < self.deadline

    return [(Claim, "_open", lambda self, now: True), (Claim, "held", held)]


def _late_answer_counted_as_new() -> list[Any]:
    return [(Process, "answered", lambda self, link: link.channel.unanswered.pop())]


def _no_clean_up() -> list[Any]:
    def undo(claim: Claim, now: float, nodes: Any = None) -> Any:
        claim.ended = True
        yield from ()

    return [(quorum, "undo", undo)]


def _clean_up_of_yes_only() -> list[Any]:
    undo = quorum.undo

    def partial(claim: Claim, now: float, nodes: Any = None) -> Any:
        certain = [i for i, e in enumerate(claim.expiries) if e != lease.NEVER]
        return undo(claim, now, certain)

    return [(quorum, "undo", partial)]


def _extend_counts_replies() -> list[Any]:
    answer = Round.answer

    def generous(self: Round, node: int, reply: Any, *more: Any) -> None:
        answer(self, node, "1" * len(reply) if self.verb.extends else reply, *more)

    return [(Round, "answer", generous)]


def _no_check_after_wait() -> list[Any]:
    def grant(self: Claim, now: float) -> bool:
        self._settle(now)
        self.granted_at = now
        return True

    def held(self: Claim, now: float) -> bool:
        return self.granted_at is not None and not self.ended and self.lost is None

    return [(Claim, "grant", grant), (Claim, "held", held)]


def _no_drift() -> list[Any]:
    return [(claims, "drift", lambda ttl: 0.0)]


def _extension_after_release() -> list[Any]:
    return [(Round, "begin", lambda self: None)]


def _waiting_set_behind_release() -> list[Any]:
    connected = Pipeline.connected

    def careless(self: Pipeline, now: float) -> list[Round]:
        ended = [(c, c.ended) for r in self.waiting for c in r.claims]
        for claim, _was in ended:
            claim.ended = False
        try:
            return connected(self, now)
        finally:
            for claim, was in ended:
                claim.ended = was

    return [(Pipeline, "connected", careless)]


def _release_not_owed() -> list[Any]:
    return [(Pipeline, "owe", lambda self, round_: None)]


def _silence_is_yes() -> list[Any]:
    def silence(self: Round, node: int, reason: str) -> None:
        self._vote(node, Vote.YES)

    return [(Round, "silence", silence)]


def _watchdog_asleep() -> list[Any]:
    def put_off(self: Any, watched: Any, due: float) -> None:
        watched.due = due

    return [(watchdog.Schedule, "_put_off", put_off)]


# -- The twists


def _back_at_once(knobs: Knobs, faults: list[Fault]) -> tuple[Knobs, list[Fault]]:
    return replace(knobs, guard=False), [
        replace(fault, lasts=0.02 * knobs.ttl) if fault.kind == "crash" else fault
        for fault in faults
    ]


def _clock_jumps(knobs: Knobs, faults: list[Fault]) -> tuple[Knobs, list[Fault]]:
    return knobs, [
        Fault("jump", fault.at, 0.0, nodes=fault.nodes[:1], amount=knobs.ttl)
        if fault.kind in ("freeze", "refuse", "crash")
        else fault
        for fault in faults
    ]


MUTANTS: dict[str, Mutant] = {
    "blind-release": Mutant("a release deletes whatever is there", _blind_release,
        invariants=("I7",), overlap=9),
    "overwriting-acquire": Mutant("an acquisition overwrites what is there", _overwriting_acquire,
        invariants=("I7",), overlap=0),
    "minority-quorum": Mutant("half of the nodes are enough", _minority_quorum,
        invariants=("I9", "I2"), overlap=10),
    "counted-from-answer": Mutant("a lease counts from the answer, not from the sending",
        _counted_from_the_answer, invariants=("I2",), overlap=833),
    "token-kept": Mutant("the token of one attempt serves the next", _token_kept,
        invariants=("I5", "I2", "I9"), overlap=1079),
    "old-deadline-ignored": Mutant("an extension revives a lease that was over",
        _old_deadline_ignored, invariants=("I2",), seed=24),
    "late-answer-as-new": Mutant("a late answer is taken for that to the newest request",
        _late_answer_counted_as_new, invariants=("I9", "I2"), overlap=45),
    "two-connections": Mutant("releases travel on connections of their own",
        actor_mutants.two_connections, invariants=("I5",), seed=6),
    "close-on-timeout": Mutant("a connection that only timed out is closed",
        actor_mutants.close_on_timeout, invariants=("I5",), seed=1),
    "sent-again": Mutant("what was not answered in time is sent again on a new connection",
        actor_mutants.sent_again, invariants=("I5",), seed=1),
    "no-clean-up": Mutant("a lost vote is not undone", _no_clean_up, invariants=("I9", "I5")),
    "clean-up-of-yes-only": Mutant("nodes that have not answered are not sent the undoing",
        _clean_up_of_yes_only, invariants=("I9", "I5")),
    "extend-counts-replies": Mutant("any answer confirms an extension", _extend_counts_replies,
        invariants=("I2",), seed=51),
    "release-swallowed": Mutant("an exception in an attempt leaves it behind",
        actor_mutants.release_swallowed, invariants=("I9", "I5"), seed=3),
    "struck-while-undoing": Mutant(
        "an exception in the undoing of an attempt leaves the rest of it behind",
        actor_mutants.struck_while_undoing, invariants=("I9", "I5"), seed=11),
    "keeper-sets-again": Mutant("a keeper sets missing keys again", actor_mutants.keeper_sets_again,
        invariants=("I5",), seed=35),
    "keeper-counts-from-answer": Mutant("what a keeper extends counts from the answer",
        actor_mutants.keeper_counts_from_the_answer, invariants=("I2",), seed=5),
    "keepers-old-deadline-ignored": Mutant(
        "a keeper counts answers that it read after the old deadline",
        actor_mutants.keepers_old_deadline_ignored, invariants=("I2",), seed=6337),
    "loss-revoked": Mutant("a holder who was told of its loss believes a keeper who comes later",
        actor_mutants.loss_revoked, invariants=("I2",), seed=840),
    "keeper-deaf": Mutant("a keeper extends what its child has given up for lost",
        actor_mutants.keeper_deaf, invariants=("I4",), seed=199),
    "freed-before-death": Mutant("a keeper frees what is held by a child that only pauses",
        actor_mutants.freed_before_death, seed=174),
    "fork-releases": Mutant("a fork releases what its parent holds", actor_mutants.fork_releases,
        seed=11),
    "no-check-after-wait": Mutant("what was granted is taken for held without a look at the clock",
        _no_check_after_wait, invariants=("I2",), seed=2),
    "drift-ignored": Mutant("the whole ttl is counted as held", _no_drift, invariants=("I2",)),
    "extension-after-release": Mutant("an extension is written behind the release of its lease",
        _extension_after_release, invariants=("I5",), seed=174),
    "setting-after-owed-release": Mutant(
        "after a reconnect, what ended is asked again behind its release",
        _waiting_set_behind_release, invariants=("I5",), seed=3),
    "silence-is-yes": Mutant("a node that does not answer votes yes", _silence_is_yes,
        invariants=("I9",), seed=1),
    "loss-not-told": Mutant("the watchdog does not wake for a deadline", _watchdog_asleep,
        invariants=("I2",), seed=183),
    "fence-not-told": Mutant("the largest fencing number is granted before a quorum knows it",
        fence_mutants.not_told, invariants=("I3",), seed=1649),
    "fence-counters": Mutant("a fencing token is the largest of per-node counters",
        fence_mutants.counters, invariants=("I3",), seed=10),
    "fence-steps": Mutant("a fencing token does not begin at a wall clock, for when nodes forget",
        fence_mutants.steps, invariants=("I3",), seed=113),
    "fence-clocks-alone": Mutant(
        "a fencing token is a wall clock's time, whatever the nodes remember",
        fence_mutants.clocks_alone, invariants=("I3",), seed=18),
    "part-kept": Mutant("what was set of several keys stays when one of them is held",
        several_mutants.part_kept, invariants=("I10",), seed=SEVERAL),
    "part-freed": Mutant("of several keys only one is freed", several_mutants.part_freed,
        invariants=("I10",), seed=SEVERAL),
    "part-extended": Mutant("an extension counts where one of several keys is another's",
        several_mutants.part_extended, invariants=("I10",), seed=SEVERAL + 16),
    "permits": Mutant("each node counts how many hold a key with a limit", several_mutants.permits,
        several_mutants.limited, invariants=("I10",), seed=SEVERAL + 34),
    "any-slot": Mutant("each node chooses the slots of several keys", several_mutants.any_slot,
        several_mutants.several_limited, invariants=("I10",), seed=LIMITS + 92),
    "reader-beside-a-writer": Mutant("a reader counts a node that a writer has",
        shared_mutants.reader_beside_a_writer, shared_mutants.crowded, seed=SHARED),
    "writer-beside-readers": Mutant("a writer counts a node that readers have",
        shared_mutants.writer_beside_readers, shared_mutants.crowded, seed=SHARED),
    "extended-beside-a-writer": Mutant("a reader is extended where a writer has come",
        shared_mutants.extended_beside_a_writer, shared_mutants.crowded, seed=SHARED),
    "all-readers-freed": Mutant("a reader that goes takes the others with it",
        shared_mutants.all_readers_freed, shared_mutants.crowded, seed=SHARED),
    "guard-off": Mutant("the restart guard trusts every node", actor_mutants.guard_off, seed=107),
    "swapped-long-ago": Mutant(
        "a server that was started since we opened a connection counts as restarted then",
        actor_mutants.swapped_long_ago, seed=CHANGED + 15),
    "trusted-as-before": Mutant("a server is trusted again because it once was",
        actor_mutants.trusted_as_before, seed=CHANGED + 2),
    "never-looks-again": Mutant("what a node is, is asked of new connections only",
        actor_mutants.never_looks_again, seed=CHANGED + 4),
    "immediate-restart": Mutant("a node that forgot everything votes at once", twist=_back_at_once,
        premise=True, seed=107),
    "clock-jump": Mutant("a node's clock jumps", twist=_clock_jumps, premise=True, seed=51),
}  # fmt: skip
