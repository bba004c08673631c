"""The options, once: name, type, default, check, meaning.

Every option is either global (`redlock_x` in the Celery configuration), or of a task (`lock_x` on
a `SingletonTask`, `x` in `@locked`), or both: then the global one is the default of the tasks.
Durations are seconds. The fields of `Settings` and `TaskOptions` are the table: `GLOBAL` and `TASK`
are read from them, and so are the docs. Only what type checkers must find written out stands
elsewhere (`LockOptions`, `SingletonTask`), and a test compares it.
"""

# ruff: noqa: RUF009  (`_option` returns a field of a dataclass)

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypedDict

from ..protocol.errors import ConfigurationError
from . import checks
from .checks import DAY, MIN_TTL, ConflictPolicy, OnDuplicate, Scope

__all__ = [
    "GLOBAL",
    "TASK",
    "LockOptions",
    "Option",
    "Settings",
    "TaskOptions",
    "check_option",
    "guarded",
]


Key: TypeAlias = Sequence[str] | Callable[..., str | Collection[str]] | None
OnConflict: TypeAlias = ConflictPolicy | Callable[[Any, Any], str]
OnDeadline = Literal["raise", "skip", "reject"]
OnUnavailable = Literal["retry", "raise", "run"]
LossPolicy = Literal["raise", "log"]
OnLost: TypeAlias = LossPolicy | Callable[[Any], object]


@dataclass(frozen=True)
class Option:
    """What is known of one option besides its name and type."""

    default: Any
    check: checks.Check
    about: str  # what it does, for the docs


def _option(default: Any, check: checks.Check, about: str) -> Any:
    return field(default=default, metadata={"option": Option(default, check, about)})


@dataclass(frozen=True, eq=False, repr=False)
class _Shared:
    """What an app sets for all its tasks, and a task for itself."""

    ttl: float = _option(
        30.0,
        checks.seconds(
            MIN_TTL,
            day="a holder that dies blocks the resource for that long. A lease is extended while"
            " its task runs, so the ttl can be short",
        ),
        "How long the nodes keep a lock that nobody extends; seconds.",
    )
    wait: float = _option(
        0.5,
        checks.seconds(zero=True),
        "How long a task waits in its process for a lock before the conflict policy applies;"
        " seconds. It occupies a pool slot meanwhile. A task that does not set it waits for its"
        " `ttl` with the policies `wait` and `replace`, and not at all with `skip`, `raise` and"
        " `reject`, or where its deliveries are parked.",
    )
    retry_backoff: float = _option(
        1.0,
        checks.seconds(),
        "A task that must be retried later is sent again after a random time up to this, which"
        " doubles with every attempt; seconds.",
    )
    retry_backoff_max: float = _option(
        60.0, checks.seconds(), "The longest of these times; seconds."
    )
    retry_deadline: float | None = _option(
        None,
        checks.or_none(checks.seconds()),
        "When to give up retrying and fail: seconds for which one and the same holder has been in"
        " the way, or too few nodes have answered. Time in which the key changes hands does not"
        " count: waiting is not failing. None: never.",
    )
    max_lifetime: float | None = _option(
        DAY,
        checks.or_none(checks.seconds()),
        "How long a lock is extended at most, for tasks that hang; seconds, None for no limit. Then"
        " the body is told that its lease is lost, even if the ttl is longer.",
    )
    fencing: bool = _option(
        False,
        checks.flag,
        "Give every lease a fencing token, a number that grows with each grant of its resource:"
        " the system that is written to can refuse a holder that has been overtaken.",
    )


@dataclass(frozen=True)
class Settings(_Shared):
    """The global options of an app, checked."""

    nodes: Sequence[Any] = _option(
        None,
        checks.nodes,
        "The independent Redis masters: URLs, clients or mappings of connection arguments."
        " If not set, the broker, where that is a Redis.",
    )
    prefix: str = _option("redlock:", checks.text, "What the keys on the nodes begin with.")
    node_timeout: float = _option(
        0.25,
        checks.seconds(0.001),
        "How long to wait for a node's answer, never more than a tenth of the ttl; seconds.",
    )
    keeper: str = _option(
        "thread",
        checks.one_of(Literal["thread", "process"]),
        "What extends a lock for the process that holds it. `thread`: one of its threads, and in a"
        " prefork worker the main process as well. `process`: a small process besides, which goes"
        " on while a C call keeps the GIL, and frees at once what a killed process held; it takes"
        " about 25 MB, and logs to stderr.",
    )
    restart_guard: str = _option(
        "auto",
        checks.one_of(Literal["auto", "uptime", "off"]),
        "`uptime`: a node that was started more recently than the longest ttl in use has no"
        " vote, because it may have forgotten locks; unless it has `appendfsync always`. `off`:"
        " it votes. `auto`: `uptime` with three nodes or more, else `off`.",
    )
    enabled: bool = _option(True, checks.flag, "False: no task takes a lock, for tests.")
    parking: bool = _option(
        True,
        checks.flag,
        "A worker keeps deliveries that wait for a lock in its main process, and lets them go"
        " one after the other; none of them waits in a pool slot, none polls. False: each waits"
        " in its slot for `wait`, and is sent again after a random time.",
    )
    events: bool = _option(
        False,
        checks.flag,
        "Send the events `task-lock-waiting`, `task-lock-acquired` and `task-lock-lost` to"
        " programs that monitor the workers, such as Flower.",
    )
    beat: bool = _option(
        None,
        checks.or_none(checks.flag),
        "Send each tick of a periodic task once, however many beats run. None: if"
        " `redlock_nodes` is set.",
    )
    beat_on_unavailable: str = _option(
        "hold",
        checks.one_of(Literal["hold", "send"]),
        "If too few nodes answer a beat: hold what is due until they do, or send it, from every"
        " beat.",
    )


@dataclass(frozen=True)
class TaskOptions(_Shared):
    """The options of a task, all of them: its own, else the app's, else the defaults.

    Attributes:
        wait: That of the task's policy; 0 where a function is yet to be asked for one.
        waits: By policy, how long a task that has it waits in its process; seconds.
    """

    key: Key = _option(
        None,
        checks.key,
        "What is exclusive: a template over the task's arguments, such as"
        " `order:{order_id}`; a list of templates, for all or none of several; a list of"
        " arguments' names; or a function that is called with the arguments. None: the task's"
        " name and all its arguments. See [Keys and limits](keys.md).",
    )
    scope_name: str | None = _option(
        None,
        checks.or_none(checks.text),
        "What the key begins with, in place of the task's name: tasks that have the same share"
        " their keys. None: the task's name where there is no template, else nothing.",
    )
    limit: int = _option(1, checks.limit, "How many bodies may run at a time per key.")
    scope: Scope = _option(
        "while_executing",
        checks.one_of(Scope),
        "From when to when a key is taken: while the body runs; or from its publication on, by"
        " a reservation.",
    )
    reserve_ttl: float | None = _option(
        None,
        checks.or_none(checks.seconds(MIN_TTL)),
        "How long the nodes keep a reservation, counted from the message's ETA; seconds. A"
        " worker that holds the message extends it. None: until the message expires, else an"
        " hour. A call (`lock=`, ETA, `expires`) can make it last for 31 days from now at most, or"
        " for as long as is declared here, if that is longer.",
    )
    on_duplicate: OnDuplicate = _option(
        "existing",
        checks.one_of(OnDuplicate),
        "If another has the reservation when a task is published: return the result of that"
        " one, raise DuplicateTask, return a result that says it was skipped, or revoke the one"
        " that is queued and take its place.",
    )
    hold_for: float = _option(
        0.0,
        checks.seconds(
            zero=True,
            day="a restarted node has no vote for that long. To keep a key longer, reserve it:"
            " scope 'until_expired' and reserve_ttl",
        ),
        "How long a lock is kept at least, counted from when it was taken, even if the body ends"
        " before; seconds, at most a day.",
    )
    on_conflict: OnConflict = _option(
        "retry",
        checks.or_callable(checks.one_of(ConflictPolicy), "the holder", "the request"),
        "If another holds the lock: send the task again later, skip it, raise ResourceHeld,"
        " wait in its pool slot for up to `wait`, reject the message (to a dead letter"
        " exchange), replace the holder (revoke it, and wait for its end); or what a function"
        " says that is given the holder and the request.",
    )
    on_deadline: OnDeadline = _option(
        "raise",
        checks.one_of(OnDeadline),
        "When `retry_deadline` is over, or the wait of the policies `wait` and `replace`: raise"
        " ResourceHeld (or QuorumUnavailable), skip the task, or reject its message. Refused"
        " where there is no such time.",
    )
    on_unavailable: OnUnavailable = _option(
        "retry",
        checks.one_of(OnUnavailable),
        "If too few nodes answer: send the task again later, raise QuorumUnavailable, or run"
        " it without a lock.",
    )
    on_lost: OnLost = _option(
        "raise",
        checks.or_callable(checks.one_of(LossPolicy), "the lease"),
        "If the lease is lost while the task runs: raise LeaseLost in it, only log it, or call"
        " a function with the lease.",
    )
    waits: Mapping[str, float] = field(default_factory=dict)


def _table(kind: Any) -> dict[str, Option]:
    return {f.name: f.metadata["option"] for f in fields(kind) if "option" in f.metadata}


GLOBAL: Mapping[str, Option] = _table(Settings)
TASK: Mapping[str, Option] = _table(TaskOptions)


class LockOptions(TypedDict, total=False):
    """The options of `@locked`, typed for editors and type checkers; `TASK` has all the rest."""

    key: Key
    ttl: float
    wait: float
    retry_backoff: float
    retry_backoff_max: float
    retry_deadline: float | None
    max_lifetime: float | None
    fencing: bool
    scope_name: str | None
    limit: int
    scope: Scope
    reserve_ttl: float | None
    on_duplicate: OnDuplicate
    hold_for: float
    on_conflict: OnConflict
    on_deadline: OnDeadline
    on_unavailable: OnUnavailable
    on_lost: OnLost


def guarded(restart_guard: str, nodes: int) -> bool:
    """Return whether nodes that may have forgotten locks have no vote.

    "auto" leaves one node alone: waiting after each of its starts protects from nothing but its own
    crash, and whoever runs one has accepted that. Of two, both must grant a lock: if one forgets,
    the other still says no. From three on, one that forgets is enough for two holders.
    """
    return restart_guard == "uptime" or (restart_guard == "auto" and nodes > 2)


def check_option(name: str, value: Any, label: str | None = None) -> Any:
    """Return the value of one option, checked; an error calls it by `label`, else by `name`.

    Raises:
        ConfigurationError: It cannot work; says why and what to give instead.
    """
    option = TASK.get(name) or GLOBAL[name]
    try:
        return option.check(value)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{label or name} {error}; it is {value!r}") from None
