"""One call of a locked task, before it is made: its keys, its options, and what would become of it.

The rules are those of `publish.py` and `policy.py`, in words; nothing is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..config.options import TASK, TaskOptions
from ..config.settings import enabled, given_names
from ..keys.resolver import Templates
from ..messages.headers import MAX_ID_CHARS
from ..messages.policy import Action, decide, parkable
from ..protocol.errors import NotAcquired, QuorumUnavailable, ResourceHeld
from ..protocol.values import printable

if TYPE_CHECKING:
    from ..config.task_lock import TaskLock
    from ..survey.models import Entry

__all__ = ["Call", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What would become of a call.

    Attributes:
        outcome: In a word, for programs.
        text: In a sentence, for people.
    """

    outcome: str
    text: str

    def data(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Call:
    """A call that might be made.

    Attributes:
        task: The task.
        resources: What it locks.
        rule: How that was made of the arguments.
        how: Its options, resolved.
        options: The same for people: name, value, and who says so ("task", "app", "default").
        enabled: Whether locks are taken at all.
    """

    task: Any
    resources: tuple[str, ...]
    rule: str
    how: TaskOptions
    options: tuple[tuple[str, Any, str], ...]
    enabled: bool

    @classmethod
    def of(cls, task: Any, lock: TaskLock, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call of `task` with these arguments.

        Raises:
            ConfigurationError: No key can be made of them, or a setting cannot work.
        """
        conf = task.app.conf
        how = lock.options(task.app)
        own, given = lock.own, set(given_names(conf))
        options = tuple(
            (name, _plain(getattr(how, name)), _source(name, own, given)) for name in TASK
        )
        resources = lock.resources(task, task.run, args, kwargs)
        return cls(task, resources, _rule(task.name, how), how, options, enabled(conf))

    def verdicts(
        self, entries: Iterable[Entry], refusal: QuorumUnavailable | None
    ) -> tuple[Verdict, Verdict]:
        """What `.delay()` would return, and what the body would do.

        Args:
            entries: All that is known of its resources.
            refusal: Why nothing is.
        """
        if not self.enabled:
            run = Verdict("unlocked", "runs without a lock: redlock_enabled is False")
            return Verdict("sent", "sends the message: redlock_enabled is False"), run
        found = [entry for entry in entries if entry.resource in self.resources]
        published = self._published(found, refusal)
        if published.outcome in ("existing", "raise", "skip"):
            never = "does not run: its message is not sent (members of groups, chords and chains"
            return published, Verdict("none", f"{never} are, and end with the marker Skipped)")
        return published, self._run(found, refusal)

    # -- Published -------------------------------------------------------------------------------

    def _published(self, entries: Sequence[Entry], refusal: QuorumUnavailable | None) -> Verdict:
        how = self.how
        if self.task.app.conf.task_always_eager:
            return Verdict("eager", "runs the body here and now: task_always_eager is set")
        if how.scope == "while_executing":
            return Verdict("sent", "sends the message, whoever holds the lock")
        if refusal is not None:
            if how.on_unavailable == "raise":
                return Verdict("raise", "raises QuorumUnavailable: too few nodes answer")
            return Verdict("sent", "sends the message without a reservation: too few nodes answer")
        reserved = [entry for entry in entries if entry.kind == "reservation" and entry.held]
        other = next((e.owner for e in reserved if e.owner and e.owner.task_id), None)
        if other is None:
            kept = (
                "until it expires, else an hour"
                if how.reserve_ttl is None
                else (f"for {how.reserve_ttl:g} s")
            )
            return Verdict("sent", f"reserves the key {kept}, and sends the message")
        return self._duplicate(other.task_id, entries)

    def _duplicate(self, other: str, entries: Sequence[Entry]) -> Verdict:
        policy = self.how.on_duplicate
        running = any(e.kind == "lock" and e.owner and e.owner.task_id == other for e in entries)
        if policy == "raise":
            return Verdict("raise", f"raises DuplicateTask: {other} has reserved the key")
        if policy == "skip" or len(other) > MAX_ID_CHARS:
            return Verdict("skip", f"returns a result with the marker Skipped: {other} has the key")
        if policy == "replace" and not running:
            return Verdict("replace", f"revokes {other}, which is queued, and takes its place")
        why = ", which runs already" if policy == "replace" else ""
        return Verdict("existing", f"sends nothing, and returns the result of {other}{why}")

    # -- Run -------------------------------------------------------------------------------------

    def _run(self, entries: Sequence[Entry], refusal: QuorumUnavailable | None) -> Verdict:
        how = self.how
        if how.scope == "until_executing":
            return Verdict("run", "runs as soon as it is delivered: its scope locks no body")
        if refusal is not None:
            return self._refused(refusal)
        taken = [entry for entry in entries if entry.kind in ("lock", "foreign")]
        busy = [entry for entry in taken if _occupied(entry) > entry.total - entry.quorum]
        if len(busy) < (how.limit if len(self.resources) == 1 else 1):
            free = "" if how.limit == 1 else f" ({how.limit - len(busy)} of {how.limit} slots free)"
            return Verdict("run", f"runs as soon as it is delivered: the key is free{free}")
        met = self._refused(ResourceHeld("held"))
        forever = [entry.key for entry in busy if entry.kind == "foreign" and entry.leaked]
        if forever:
            where = f"another program's {forever[0]} has no ttl, and is in its way forever;"
            return Verdict(met.outcome, f"{where} it {met.text}")
        return met

    def _refused(self, refusal: NotAcquired) -> Verdict:
        """It gets no lock: what `decide` tells a worker, in words."""
        how, action = self.how, decide(self.how, refusal)
        few = isinstance(refusal, QuorumUnavailable)
        waits = f"waits in its pool slot for up to {action.wait:g} s, then " if action.wait else ""
        if action.do == "ask":
            name = printable(
                getattr(how.on_conflict, "__qualname__", None) or repr(how.on_conflict)
            )
            return Verdict("ask", f"does what {name} says, which is given the holder")
        if action.do == "run":
            return Verdict("unlocked", "runs WITHOUT its lock: too few nodes answer")
        if action.do == "retry":
            until = _deadline(action)
            if few:
                return Verdict("again", f"is sent again until enough nodes answer, {until}")
            if self._parked:
                return Verdict("parked", f"waits without a pool slot (parked), {until}")
            return Verdict("again", f"{waits}is sent again after a random time, {until}")
        if few:
            return Verdict("raise", "fails with QuorumUnavailable: too few nodes answer")
        if action.do in _END:
            return Verdict(action.do, f"{waits}{_END[action.do]}: the key is held")
        if action.do == "wait":
            return Verdict("wait", waits + _END[action.then])
        return Verdict("replace", f"has the holder revoked, and runs when that is dead; not within"
                       f" {action.wait:g} s: {_END[action.then]}")  # fmt: skip

    @property
    def _parked(self) -> bool:
        conf = self.task.app.conf
        parking = conf.get("redlock_parking", True) and not conf.get(
            "worker_disable_prefetch", False
        )
        return bool(parking) and parkable(self.how)


_END = {"skip": "is skipped", "reject": "is rejected", "raise": "fails"}


def _deadline(action: Action) -> str:
    if action.deadline is None:
        return "forever"
    return f"for up to {action.deadline:g} s, then {_END[action.then]}"


def _occupied(entry: Entry) -> int:
    """How many nodes would say no, whoever has them."""
    sets = (entry.ttls, *(rival.ttls for rival in entry.rivals))
    return sum(any(left is not None for left in of_node) for of_node in zip(*sets, strict=True))


def _rule(task: str, how: TaskOptions) -> str:
    key, scope = how.key, how.scope_name
    before = f"scope_name {scope!r}" if scope is not None else f"the task's name {task!r}"
    if key is None:
        return f"{before} and all its arguments"
    if callable(key):
        name = printable(getattr(key, "__qualname__", None) or repr(key))
        return f"the function {name}" + (f", behind {before}" if scope is not None else "")
    if isinstance(key, (str, Templates)) or not all(n.isidentifier() for n in key):
        several = (key,) if isinstance(key, str) else key
        text = "the template" + ("s " if len(several) > 1 else " ") + ", ".join(map(repr, several))
        return text + (f", behind {before}" if scope is not None else "")
    return f"{before} and its arguments {', '.join(key)}"


def _source(name: str, own: Mapping[str, Any], given: set[str]) -> str:
    return "task" if name in own else "app" if name in given else "default"


def _plain(value: Any) -> Any:
    """As JSON takes it."""
    if callable(value):
        return getattr(value, "__qualname__", None) or repr(value)
    if isinstance(value, tuple):
        return list(value)
    return None if value == math.inf else value
