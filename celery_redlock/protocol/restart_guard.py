"""Decide from a node's report about itself if its vote counts.

A node that restarts without its data has forgotten the locks it granted. If it votes at once, it
may grant one of them to somebody else while the holder still relies on it. The remedy of the Redis
page ("Performance, crash recovery and fsync") is that such a node takes no part until every lock
that was alive when it crashed is over. Here the *clients* enforce that, because nobody configures
it on servers: a node has no vote until it has been up for longer than the longest ttl in use. Only
the ttls of locks count for that. If an earlier grant of the same name may count for longer (a start
of a rate, a lock with `hold_for`), the claim has a `Claim.recall`, and for that time the node has
no vote on that claim.

A token that an extension sets again on such a node does count. The answer is read before the old
deadline, and until then no other can have been granted the lock: the node has forgotten no living
lease of this resource except this very one (`docs/algorithm.md`, "A node that forgot").

The rules. A *memory* is one run of one server (`run_id`) under one replication id. A memory has no
vote until a whole span has passed since the latest moment at which it may have lacked a lock that
was granted at its address. That moment is:

1. After a restart: the start, by its uptime. Everything that it forgot was granted before that.
2. For a promoted replica: the moment at which it is met. Nobody can see when it was promoted, or
   which writes never reached it. A client that has known it for a span marks it (`TRUSTED_KEY`),
   and for other clients it then counts as met that long ago. Behind Sentinels a little is added,
   because other clients use the old master until they, too, have the news (`NEWS_S`).
3. For a different server at the same address: the moment at which it is met, because until now the
   previous server may have granted locks. The server is a different one if it was already up when
   the previous run was last asked for something that it answered. Otherwise it counts as a restart
   (rule 1), however long ago that was: we can see no difference. The time of the request decides,
   not the time at which its answer was read: an idle process reads it with its next request.
4. For the same run with a new history (`master_replid2`): the moment at which that is seen. It was
   a replica in between, so rule 2 holds. No client is disconnected when a server becomes a replica,
   or a master again. So the node is asked for its role again, ahead of a request whose answer is a
   vote, if no write of ours has shown recently that it is a master (`LOOK_AFTER_S`). A new
   replication id without a history means that a master has gained its first replica or lost its
   last one; or that a server was promoted an hour ago (`BACKLOG_S`) or earlier.
5. All of this belongs to the address, and to the memory that was met there last. A server that was
   swapped out and is met there again is new: it does not have the locks that the other one granted
   meanwhile, however long it was known before. Behind Sentinels it would have been a replica, with
   another history since. There, for a client that slept through a failover, the mark of other
   clients counts (rule 2). A broken connection changes nothing by itself: otherwise every client
   would be without nodes for a span whenever its idle connections are closed.
6. A report of an append-only file exempts a server from nothing: the file may be another one than
   before, or of yesterday, or from before a time without one.

The rest is configuration: replicas, cluster members and one server under two names are not
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
"""A `Memory.began` so long ago, or of such a kind, that no lock can be missing."""

LOOK_AFTER_S = 0.001
"""Seconds after which a node is asked for its role again, counted from the last write that proved
it a master: less than it takes to become a replica, to load another's data and to be promoted (3 ms
at least were seen: two empty servers on one machine)."""

NEWS_S = 3.0
"""Seconds for which the previous master, if it still runs, may grant locks to other clients after
one client has met the promoted replica. Sentinels inform each other of a failover within two
seconds, and each informs its clients at once."""

BACKLOG_S = 3600.0
"""Seconds for which a promoted server without replicas at least reports that it was a replica
(`repl-backlog-ttl`, by the servers' default)."""

ANOTHER = "is another server than before, met"


class Doubt(str):
    """The reason why a node's vote does not count, for people; `left`: for how long, in seconds."""

    left = 0.0


@dataclass(slots=True)
class Memory:
    """A memory that was met at an address, and the time from which it is trusted.

    Attributes:
        facts: Its report about itself.
        began: The latest time at which it may have lacked a lock; `ALWAYS` for never.
        heard: The send time of the last request that it has answered, as far as noted.
        started: The latest time at which it may have been started.
        what: The event at `began`, for people.
        marked: The time when its mark was last seen, or set.
    """

    facts: NodeInfo
    began: float = ALWAYS
    heard: float = ALWAYS
    started: float = ALWAYS
    what: str = "started"
    marked: float = ALWAYS

    def same(self, facts: NodeInfo) -> bool:
        """Return True if `facts` are of this very memory."""
        ours, theirs = self.facts, (facts.run_id, facts.replication, facts.history)
        return (ours.run_id, ours.replication, ours.history) == theirs


class RestartGuard:
    """The memories of all nodes. It survives a fork: a child starts with its parent's.

    Args:
        on: True if a node that may have forgotten locks has no vote.
        longest: The longest ttl of a lock in use, as far as known; seconds.
        say: Function that takes a warning. No warning is given twice.

    Attributes:
        longest: See above.
        span: The seconds for which a node that lost its memory has no vote: `longest` and the
            drift.
    """

    def __init__(self, on: bool, longest: float, say: Callable[[str], None]) -> None:
        self.on = on
        self.longest = self.span = 0.0
        self.expect(longest)
        self._warn = say
        self._warned: set[str] = set()
        self._met: dict[int, Memory] = {}

    def expect(self, ttl: float) -> None:
        """Note that locks with this ttl (seconds) are in use, here or elsewhere."""
        if ttl > self.longest:
            self.longest, self.span = ttl, _span(ttl)

    def warning_to(self, say: Callable[[str], None]) -> RestartGuard:
        """Return a guard that shares these memories, but has another function `say`."""
        other = RestartGuard(self.on, self.longest, say)
        other._warned, other._met = self._warned, self._met
        return other

    def meet(
        self, index: int, facts: NodeInfo, asked: float, now: float, moves: bool = False
    ) -> Memory:
        """Return the memory of a node that has just reported `facts`.

        Args:
            index: The node's index.
            facts: Its report.
            asked: A time before it was asked for the report; seconds.
            now: A time after it answered; seconds.
            moves: True if a replica takes its place while the old master may still run (`NEWS_S`).
        """
        if not self.on or facts.uptime is None:
            return Memory(facts)
        before = self._met.get(index)
        if before is not None and before.same(facts):
            before.facts, before.heard = facts, max(before.heard, asked)
            return before  # rule 5
        # Both ends of the uptime are cut to whole seconds: it may be wrong by one, either way.
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
        """Return True if this memory is the one that was met last at the address."""
        return self._met.get(index) is memory

    def heard(self, index: int, memory: Memory, asked: float) -> None:
        """Note the send time (`asked`) of the last request that a memory has answered.

        It must be noted before another memory is met, because rule 3 compares the two.
        """
        known = self._met.get(index)
        if known is memory:
            memory.heard = max(memory.heard, asked)
        elif known is not None and known.started <= asked:
            # There are two connections: over the other one `known` was met while this memory still
            # answered.
            known.began, known.what = max(known.began, asked), ANOTHER  # rule 3

    def doubt(self, memory: Memory, now: float, recall: float = 0.0) -> Doubt | None:
        """Return the reason why a node's vote does not count at `now`; None if it counts.

        `recall` is the `Claim.recall` of the claim that the vote is on; seconds.
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
        """Give the warnings about a node that has just been met, each once."""
        facts, doubt = memory.facts, self.doubt(memory, now)
        if facts.denied or facts.uptime is None:
            why = f" ({facts.denied})" if facts.denied else ""
            self._once(
                "denied",
                f"node {name} does not show its INFO{why}: nobody will notice if it has been"
                " restarted without its locks, is a replica or evicts keys; allow INFO, see the ACL"
                " rule in the docs. (The same may be true of other nodes.)",
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
                f"node {name} {doubt}. You can only wait: the longest ttl in use is"
                f" {self.longest:g} s.{_cause(memory)}",
            )

    def _once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(text)


class Trust:
    """The trust in one node, kept from one connection to it to the next.

    Attributes:
        memory: The memory that was met there last.
        heard: The send time of the last request that it has answered; seconds.
        unsure: Why it does not report if it still is a master; empty if it does, or is not asked.
    """

    def __init__(self, guard: RestartGuard, index: int, moves: bool = False) -> None:
        self.memory = Memory(NodeInfo())
        self.heard = ALWAYS
        self.unsure = ""
        self._guard = guard
        self._index, self._moves = index, moves
        self._proved = math.inf  # send time of the last request that only a master can execute
        self._asked = ALWAYS  # when it was last asked for its role

    def connected(self, facts: NodeInfo, asked: float, now: float) -> None:
        """Accept a node's report about itself on a new connection; see `RestartGuard.meet`."""
        self.left()
        self.memory = self._guard.meet(self._index, facts, asked, now, self._moves)
        self.heard, self.unsure, self._asked = asked, "", ALWAYS
        self._proved = asked if self._guard.on and facts.uptime is not None else math.inf

    def left(self) -> None:
        """Report the last answered request to the guard, because the connection has ended."""
        if self.heard > ALWAYS:
            self._guard.heard(self._index, self.memory, self.heard)

    def to_ask_again(self, now: float) -> bool:
        """Return True if it must be asked for its role again, ahead of a request (rule 4)."""
        return now > self._proved + LOOK_AFTER_S and now > self._asked + LOOK_AFTER_S

    def asked_again(self, now: float) -> None:
        """Note that it was asked for its role at `now`."""
        self._asked = now

    def to_mark(self, now: float) -> str:
        """Return the mark to write there for other clients (rule 2), once a span; else empty."""
        memory, span = self.memory, self._guard.span
        if not memory.facts.history or memory.began == ALWAYS:
            return ""
        if now < max(memory.began, memory.marked) + span:
            return ""
        memory.marked = now
        return f"{now - memory.began:.3f} {memory.facts.memory}"

    def still(self, sent: float, text: str) -> bool:
        """Accept the answer `text` to a request for its role, if it is the same as before.

        Return True if it is; `sent` is the send time of that request.
        """
        if not (self.memory.facts.still(text) and self._guard.knows(self._index, self.memory)):
            return False
        self._proved, self.unsure = max(self._proved, sent), ""
        self.memory.heard = max(self.memory.heard, sent)
        return True

    def told(self, sent: float, said: NodeInfo, now: float) -> str:
        """Accept a changed answer to a request for its role, sent at `sent`.

        Answers come in order, so the vote that follows it has not been read yet.

        Returns:
            Why it cannot be a node any more; empty if it can.
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

    def unanswered(self, why: str, *, forbidden: bool) -> None:
        """Note that it did not answer a request for its role, for the reason `why`.

        If that is `forbidden` to us, its role is not checked any more. Otherwise its votes do not
        count until it answers.
        """
        if forbidden:
            self._proved = math.inf
        else:
            self.unsure, self._asked = why, ALWAYS  # the next request asks again

    def wrote(self, sent: float) -> None:
        """Note that it executed a write that was sent at `sent`: only a master does."""
        if sent > self._proved and not self.unsure:
            self._proved = sent

    def doubt(self, now: float, recall: float = 0.0) -> str:
        """Return why its vote on a claim with this `recall` does not count; empty if it counts."""
        return self._guard.doubt(self.memory, now, recall) or self.unsure


def _span(seconds: float) -> float:
    """Return the seconds for which a node may lack a lock with a ttl of `seconds`."""
    return seconds + drift(seconds)


def _cause(memory: Memory) -> str:
    if memory.what == ANOTHER:
        return " It was running while the previous server answered, so it is a different server."
    if memory.facts.history:
        return " It was a replica once; nobody knows when it was promoted."
    return ""
