"""Which node may vote: from what it says of itself.

A node that restarts without its data has forgotten the locks it granted. If it votes at once, it
may grant one of them to somebody else while its holder still counts on it. The Redis page's remedy
("Performance, crash recovery and fsync") is to let it take no part until every lock that was alive
when it crashed is over. Here the *clients* see to that, as nobody configures it on servers: a node
has no vote until it has been up for longer than the longest ttl in use. Only locks count for that.
Where an earlier grant of the same name may count for longer (a start of a rate, a lock with
`hold_for`), the claim says so (`Claim.recall`), and the node has no vote on that claim alone.

What an extension sets again on such a node does count. It is read before the old deadline, and
until then no other can have been granted the lock: what the node forgot was of no living lease but
this one (`docs/algorithm.md`, "A node that forgot").

The rules. A *memory* is one run of one server (`run_id`) under one replication id. A memory has no
vote until a whole span has passed since the latest moment at which it may have lacked a lock that
was granted at its address:

1. It was started no later than its uptime says: what it forgot was granted before that.
2. A promoted replica was met now. Nobody knows when it was promoted, nor what never reached it.
   Who has known it for a span marks it (`TRUSTED_KEY`): others have met it as long ago as that.
   Behind Sentinels, other clients go on asking the old master until they, too, have the news.
3. A run that was up when the run before it was last asked for something that it answered is not
   that server come back but another, met now: up to now somebody may have been granted a lock by
   the other. Any other is a restart, by rule 1, however long ago it was: for all we can see, it is
   one. When an answer was read says nothing. An idle process reads it with its next request.
4. The same run with a history (`master_replid2`) that it did not have was a replica in between:
   met now, by rule 2. No client is disconnected when a server becomes a replica, or a master again.
   So it is looked at again, ahead of a request whose answer is a vote, where no write of ours has
   shown for a while that it is a master (`LOOK_AFTER_S`). A new replication id without a history is
   that of a master which has gained its first replica or lost its last one; or, after an hour
   (`BACKLOG_S`), of one that was promoted then or earlier.
5. What is known belongs to the address, and to the memory that was met there last. A server that
   was swapped out and is met there again is a stranger: it does not know what the other granted
   meanwhile, however well it was known before. Behind Sentinels it would have been a replica, with
   another history since: there, to a client that slept over a failover, the mark of the others
   counts (2). That a connection breaks changes nothing by itself: else every client would be
   without nodes for a span whenever its idle connections are closed.
6. What a server says of its append-only file exempts it from nothing: the file may be another than
   before, of yesterday, or from before a time without one.

The rest is configuration: replicas, cluster members and one server under two names are no
independent masters.

Pure: facts and the time come in, verdicts go out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .lease import drift
from .node_info import NodeInfo

__all__ = ["ALWAYS", "LOOK_AFTER_S", "Doubt", "Memory", "RestartGuard", "Trust"]

ALWAYS = -math.inf
"""Began: so long ago, or with such a memory, that nothing is forgotten."""

LOOK_AFTER_S = 0.001
"""How long after the last write that proved it a master a node is asked again: less than it takes
to become a replica, to load another's data and to be promoted (3 ms at least were seen: two empty
servers on one machine)."""

NEWS_S = 3.0
"""How long after one client has met a promoted replica others may be granted locks by the master
before it, where that still runs: Sentinels tell each other of a failover within two seconds, and
each its clients at once."""

BACKLOG_S = 3600.0
"""How long a promoted server without replicas remembers that it was one, at least
(`repl-backlog-ttl`, as servers have it by default)."""

ANOTHER = "is another server than before, met"


class Doubt(str):
    """Why the vote of a node does not count, for people; and for how many seconds it does not."""

    left = 0.0


@dataclass(slots=True)
class Memory:
    """A memory that was met at an address, and how far it is to be believed.

    Attributes:
        facts: What it said of itself.
        began: The latest time at which it may have lacked a lock; `ALWAYS` for never.
        heard: When it was last asked for what it has answered, as far as that has been noted.
        started: The latest time at which it may have been started.
        what: What happened at `began`, for people.
        marked: When its mark was last seen, or set.
    """

    facts: NodeInfo
    began: float = ALWAYS
    heard: float = ALWAYS
    started: float = ALWAYS
    what: str = "started"
    marked: float = ALWAYS

    def same(self, facts: NodeInfo) -> bool:
        """Whether `facts` are of this very memory."""
        ours, theirs = self.facts, (facts.run_id, facts.replication, facts.history)
        return (ours.run_id, ours.replication, ours.history) == theirs


class RestartGuard:
    """What is known of the nodes' memories. Survives a fork: children know what the parent knew.

    Args:
        on: Whether a node that may have forgotten locks has no vote.
        longest: The longest ttl of a lock in use, as far as known; seconds.
        say: Takes a warning. Nothing is said twice.

    Attributes:
        longest: See above.
        span: Seconds for which a node that has lost its memory has no vote: that, and the drift.
    """

    def __init__(self, on: bool, longest: float, say: Callable[[str], None]) -> None:
        self.on = on
        self.longest = self.span = 0.0
        self.expect(longest)
        self._say = say
        self._said: set[str] = set()
        self._met: dict[int, Memory] = {}

    def expect(self, ttl: float) -> None:
        """Note that locks of this ttl are in use, in seconds; here or elsewhere."""
        if ttl > self.longest:
            self.longest, self.span = ttl, _span(ttl)

    def saying(self, say: Callable[[str], None]) -> RestartGuard:
        """Return a guard with the same memory that gives its warnings to somebody else."""
        other = RestartGuard(self.on, self.longest, say)
        other._said, other._met = self._said, self._met
        return other

    def meet(
        self, index: int, facts: NodeInfo, asked: float, now: float, moves: bool = False
    ) -> Memory:
        """Return what is to be believed of a node that has just said what it is.

        It was asked at `asked` or later, and has answered at `now` or before. `moves`: a replica
        takes its place while the old master may still run (`NEWS_S`).
        """
        if not self.on or facts.uptime is None:
            return Memory(facts)
        before = self._met.get(index)
        if before is not None and before.same(facts):
            before.facts, before.heard = facts, max(before.heard, asked)
            return before  # rule 5
        # Both ends of the uptime are cut to whole seconds: it may be off by one, either way.
        started = now - max(0.0, facts.uptime - 1.0)
        met = Memory(facts, now, heard=asked, started=started)
        if facts.history:
            met.what = "was a replica, met"  # rule 2
            met.began += NEWS_S * moves
            slept = moves and before is not None and before.heard < now - facts.trusted
            if facts.trusted and (before is None or slept):  # else 5
                met.began, met.marked = now - facts.trusted, now
        elif before is not None and before.facts.run_id == facts.run_id:
            if before.began < now - BACKLOG_S:  # rule 4
                before.began, before.what = now - BACKLOG_S, "may have been a replica until"
            before.facts, before.heard = facts, max(before.heard, asked)
            return before
        elif before is not None and started <= before.heard:
            met.what = ANOTHER  # rule 3
        else:
            met.began = started  # rule 1
        if facts.run_id or facts.replication:
            self._met[index] = met
        return met

    def knows(self, index: int, memory: Memory) -> bool:
        """Return whether this memory was met last at the address."""
        return self._met.get(index) is memory

    def heard(self, index: int, memory: Memory, asked: float) -> None:
        """Note when a memory was last asked for what it has answered, before another is met."""
        known = self._met.get(index)
        if known is memory:
            memory.heard = max(memory.heard, asked)
        elif known is not None and known.started <= asked:
            # Two connections: `known` was met over the other while this memory still answered.
            known.began, known.what = max(known.began, asked), ANOTHER  # rule 3

    def doubt(self, memory: Memory, now: float, recall: float = 0.0) -> Doubt | None:
        """Return why the vote of a node does not count at `now`, for people; None if it counts.

        `recall` is that of the claim which the vote is on; seconds.
        """
        longer = recall > self.longest
        left = memory.began + (_span(recall) if longer else self.span) - now
        if left <= 0:
            return None
        since = f"{memory.what} {max(0.0, now - memory.began):.0f}"
        doubt = Doubt(
            f"{since} s ago: it may have forgotten what counts for {recall:g} s here (hold_for, a"
            f" rate), and has no vote on this for another {left:.1f} s"
            if longer
            else f"{since} s ago: it may have forgotten locks, and has no vote for another"
            f" {left:.1f} s"
        )
        doubt.left = left
        return doubt

    def twin(self, index: int, all_facts: Sequence[NodeInfo | None]) -> int | None:
        """Return the index of another node that is the same server as node `index`."""
        facts = all_facts[index]
        if facts is None or facts.twin is not None:
            return facts.twin if facts else None
        for other, theirs in enumerate(all_facts):
            if other != index and theirs and facts.run_id and theirs.run_id == facts.run_id:
                return other
        return None

    def welcome(self, name: str, memory: Memory, now: float) -> None:
        """Say what is to be said of a node that has just been met, once."""
        facts, doubt = memory.facts, self.doubt(memory, now)
        if facts.denied or facts.uptime is None:
            why = f" ({facts.denied})" if facts.denied else ""
            self._once(
                "denied",
                f"node {name} does not tell us about itself{why}: nobody will notice if it has"
                " been restarted without its locks, is a replica or evicts keys; allow INFO, see"
                " the ACL rule in the docs. (The same may hold for other nodes.)",
            )
        if facts.eviction not in ("", "noeviction"):
            self._once(
                f"eviction {name} {facts.eviction}",
                f"node {name} evicts keys when it is full (maxmemory-policy {facts.eviction}):"
                " locks among them; set it to noeviction",
            )
        if doubt is not None:
            self._once(
                f"doubt {name} {facts.run_id} {facts.replication} {memory.began}",
                f"node {name} {doubt}. There is nothing to do but to wait: the longest ttl in use"
                f" is {self.longest:g} s.{_why(memory)} redlock_restart_guard = 'off' gives up"
                " this protection",
            )

    def _once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(text)


class Trust:
    """What a node is believed to be, between one connection to it and the next.

    Attributes:
        memory: What was met there last.
        heard: When it was last asked for what it has answered; seconds.
        unsure: Why it does not tell if it still is a master; empty if it does, or is not asked.
    """

    def __init__(self, guard: RestartGuard, index: int, moves: bool = False) -> None:
        self.memory = Memory(NodeInfo())
        self.heard = ALWAYS
        self.unsure = ""
        self._guard = guard
        self._index, self._moves = index, moves
        self._proved = math.inf  # when it was last asked for what only a master does
        self._asked = ALWAYS  # when it was last asked what it is

    def connected(self, facts: NodeInfo, asked: float, now: float) -> None:
        """Take in what a node says of itself on a new connection; see `RestartGuard.meet`."""
        self.left()
        self.memory = self._guard.meet(self._index, facts, asked, now, self._moves)
        self.heard, self.unsure, self._asked = asked, "", ALWAYS
        self._proved = asked if self._guard.on and facts.uptime is not None else math.inf

    def left(self) -> None:
        """Have the guard note when it was last asked over a connection that has ended."""
        if self.heard > ALWAYS:
            self._guard.heard(self._index, self.memory, self.heard)

    def to_ask_again(self, now: float) -> bool:
        """Whether it must be asked, ahead of a request, if it still is a master (rule 4)."""
        return now > self._proved + LOOK_AFTER_S and now > self._asked + LOOK_AFTER_S

    def asked_again(self, now: float) -> None:
        """Take in that it was."""
        self._asked = now

    def to_mark(self, now: float) -> str:
        """Return what is to be left there for others (rule 2), once a span; empty if nothing."""
        memory, span = self.memory, self._guard.span
        if not memory.facts.history or memory.began == ALWAYS:
            return ""
        if now < max(memory.began, memory.marked) + span:
            return ""
        memory.marked = now
        return f"{now - memory.began:.3f} {memory.facts.memory}"

    def still(self, sent: float, text: str) -> bool:
        """Return whether it says to that what it said before, and then take that in."""
        if not (self.memory.facts.still(text) and self._guard.knows(self._index, self.memory)):
            return False
        self._proved, self.unsure = max(self._proved, sent), ""
        self.memory.heard = max(self.memory.heard, sent)
        return True

    def told(self, sent: float, said: NodeInfo, now: float) -> str:
        """Take in what it says to that; return why it cannot be a node any more, if it cannot.

        Answers come in order: the vote behind it has not been read yet.
        """
        self._proved, self.unsure = max(self._proved, sent), ""
        facts = replace(
            self.memory.facts,
            uptime=now - self.memory.started,
            role=said.role,
            master=said.master,
            history=said.history,
            replication=said.replication,
        )
        if not facts.misfit:
            self.memory = self._guard.meet(self._index, facts, sent, now, self._moves)
        return facts.misfit

    def not_told(self, why: str, *, forbidden: bool) -> None:
        """Take in that it does not say, for now; or must not, and is not guarded any more."""
        if forbidden:
            self._proved = math.inf
        else:
            self.unsure, self._asked = why, ALWAYS  # the next request asks again

    def wrote(self, sent: float) -> None:
        """Take in that it has written, for a request of that time: only a master does."""
        if sent > self._proved and not self.unsure:
            self._proved = sent

    def doubt(self, now: float, recall: float = 0.0) -> str:
        """Return why its vote does not count on a claim with this `recall`; empty if it counts."""
        return self._guard.doubt(self.memory, now, recall) or self.unsure


def _span(seconds: float) -> float:
    """Return for how long a node may have forgotten what lasts for some seconds."""
    return seconds + drift(seconds)


def _why(memory: Memory) -> str:
    if memory.what == ANOTHER:
        return " It was up while the one before it answered, so it is not that one, started again."
    if memory.facts.history:
        return " It was a replica once; nobody knows when it was promoted."
    return ""
