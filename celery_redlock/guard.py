"""Which node may vote: from what it says of itself.

A node that restarts without its data has forgotten the locks it granted. If it votes at once, it
may grant one of them to somebody else while its holder still counts on it. The Redis page's remedy
("Performance, crash recovery and fsync") is to let it take no part until every lock that was alive
when it crashed is over. Here the *clients* see to that, as nobody configures it on servers: a node
has no vote until it has been up for longer than the longest ttl in use.

What an extension sets again on such a node does count. It is read before the old deadline, and
until then no other can have been granted the lock: what the node forgot was of no living lease but
this one (`docs/algorithm.md`, "A node that forgot").

The rest is configuration: replicas, cluster members and one server under two names are no
independent masters.

Pure: facts and the time come in, verdicts go out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .lease import drift

__all__ = ["ALWAYS", "Facts", "Guard"]

ALWAYS = -math.inf
"""Began: so long ago, or with such a memory, that nothing is forgotten."""

NO_REPLICATION_ID = "0" * 40


@dataclass(frozen=True, slots=True)
class Facts:
    """What a node says of itself.

    Attributes:
        run_id: Names one run of one server; empty if it does not say.
        uptime: Whole seconds since it was started; None if it does not say.
        role: "master" or "slave"; empty if it does not say.
        master: Of a replica: `host:port` of its master.
        cluster: Whether it is a member of a Redis Cluster.
        history: The replication id it had before it was promoted; empty if it never was.
        appends: Whether it has an append-only file.
        fsync: When that is written through to the disk; empty if it does not say.
        eviction: Its `maxmemory-policy`; empty if it does not say.
        scripts: Why it runs no scripts; empty if it does.
        denied: Why it does not tell us anything; empty if it does.
        twin: Index of a node that is this same server, as a nonce has shown; None if none is.
    """

    run_id: str = ""
    uptime: float | None = None
    role: str = ""
    master: str = ""
    cluster: bool = False
    history: str = ""
    appends: bool = False
    fsync: str = ""
    eviction: str = ""
    scripts: str = ""
    denied: str = ""
    twin: int | None = None

    @classmethod
    def of(cls, info: str, fsync: str = "") -> Facts:
        """From the text of an INFO reply."""
        said = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
        uptime = said.get("uptime_in_seconds", "")
        history = said.get("master_replid2", NO_REPLICATION_ID)
        return cls(
            run_id=said.get("run_id", ""),
            uptime=float(uptime) if uptime.isdecimal() and len(uptime) < 16 else None,
            role=said.get("role", ""),
            master=f"{said.get('master_host', '?')}:{said.get('master_port', '?')}",
            cluster=said.get("cluster_enabled") == "1",
            history="" if history == NO_REPLICATION_ID else history,
            appends=said.get("aof_enabled") == "1",
            fsync=fsync,
            eviction=said.get("maxmemory_policy", ""),
        )

    @property
    def durable(self) -> bool:
        """Whether a crash costs it nothing. What a promoted replica never got, it never had."""
        return self.appends and self.fsync == "always" and not self.history

    @property
    def misfit(self) -> str:
        """Why it cannot be a node, whatever the other nodes are; empty if it can."""
        if self.role not in ("", "master"):
            return f"it is a replica (READONLY) of {self.master}; name its master"
        if self.scripts:
            return f"it runs no scripts, so no lock could be given back there: {self.scripts}"
        if self.cluster:
            return "it is a member of a Redis Cluster (cluster_enabled:1), no independent master"
        return ""


class Guard:
    """What is known of the nodes' memories. Survives a fork: children know what the parent knew.

    Args:
        on: Whether a node that may have forgotten locks has a vote.
        longest: The longest ttl in use, as far as known; seconds.
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
        self._began: dict[str, float] = {}

    def expect(self, ttl: float) -> None:
        """Locks of this ttl are in use, in seconds; here or elsewhere."""
        if ttl > self.longest:
            self.longest, self.span = ttl, ttl + drift(ttl)

    def saying(self, say: Callable[[str], None]) -> Guard:
        """The same guard, with the same memory, that gives its warnings to somebody else."""
        other = Guard(self.on, self.longest, say)
        other._said, other._began = self._said, self._began
        return other

    def began(self, facts: Facts, now: float, before: tuple[str, float] = ("", ALWAYS)) -> float:
        """The latest time at which a node may have lost its memory.

        Args:
            facts: What it has just said.
            now: The time when it was read, or later; seconds.
            before: Which run answered at this address before, and since when we knew it.
        """
        if not self.on or facts.durable or facts.uptime is None:
            return ALWAYS
        run = f"{facts.run_id} {facts.history}"
        # Both ends of the uptime are cut to whole seconds: it may be one more than the truth.
        began = now if facts.history else now - max(0.0, facts.uptime - 1.0)
        known, since = before
        if known and known != facts.run_id and began < since:
            began = now  # older than the run that answered before: another server, not a new run
        began = min(began, self._began.get(run, began))
        if facts.run_id:
            self._began[run] = began
            self._forget_the_old(now)
        return began

    def doubt(self, facts: Facts, began: float, now: float) -> str:
        """Why the vote of a node does not count at `now`, for people; empty if it counts."""
        left = began + self.span - now
        if left <= 0:
            return ""
        what = "was a replica, met" if facts.history else "started"
        return (
            f"{what} {max(0.0, now - began):.0f} s ago: it may have forgotten locks, and has no"
            f" vote for another {left:.1f} s"
        )

    def twin(self, index: int, all_facts: Iterable[Facts | None]) -> int | None:
        """The index of another node that is the same server as node `index`."""
        known = list(all_facts)
        facts = known[index]
        if facts is None:
            return None
        if facts.twin is not None:
            return facts.twin
        for other, theirs in enumerate(known):
            if other != index and theirs and facts.run_id and theirs.run_id == facts.run_id:
                return other
        return None

    def welcome(self, name: str, facts: Facts, began: float, now: float) -> None:
        """Say what is to be said of a node that has just been connected, once."""
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
        doubt = self.doubt(facts, began, now)
        if doubt:
            run = f"doubt {name} {facts.run_id} {facts.history}"
            self._once(run, f"node {name} {doubt}. {_advice(facts, self.longest)}")

    def _once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(text)

    def _forget_the_old(self, now: float) -> None:
        if len(self._began) > 1000:
            for run, began in list(self._began.items()):
                if began + self.span < now:
                    del self._began[run]


def _advice(facts: Facts, longest: float) -> str:
    if facts.history:
        why = "It was a replica once; nobody knows when it was promoted."
    elif facts.appends and not facts.fsync:
        why = "It has an append-only file, but does not say if it is appendfsync always."
    else:
        why = "Only one that is configured with appendonly yes and appendfsync always needs none."
    return (
        f"There is nothing to do but to wait: the longest ttl in use is {longest:g} s. {why}"
        " redlock_restart_guard = 'off' gives up this protection"
    )


def fsync_of(config: Mapping[str, str]) -> str:
    """When the append-only file is written through, from `CONFIG GET *appendfsync*`."""
    if config.get("no-appendfsync-on-rewrite", "no") != "no":
        return "not while it is rewritten"
    return config.get("appendfsync", "")
