"""The options, once: name, default, unit, check.

Every option is either global (`redlock_x` in the Celery configuration), or of a task (`lock_x` on
a `SingletonTask`, `x` in `@locked`), or both: then the global one is the default of the tasks.
Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import ConfigurationError
from . import checks
from .checks import DAY, DUPLICATE_POLICIES, MIN_TTL, SCOPES

__all__ = [
    "GLOBAL",
    "TASK",
    "Option",
    "TaskOptions",
    "check_option",
    "guarded",
]


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: Without prefix.
        default: What it is if nobody says anything.
        check: Raises ValueError with what is wrong and what to give instead; returns the value.
        about: What it does, in one sentence, for the docs.
    """

    name: str
    default: Any
    check: Callable[[Any], Any]
    about: str


_SHARED = (
    Option("ttl", 30.0, checks.ttl, "How long the nodes keep a lock that nobody extends; seconds."),
    Option(
        "wait",
        0.5,
        checks.seconds(zero=True),
        "How long a task waits in its process for a lock before the conflict policy applies;"
        " seconds. It occupies a pool slot meanwhile. Where the task itself says nothing, one that"
        " skips, raises or rejects on a conflict does not wait, and one that waits or replaces does"
        " for its ttl; one whose deliveries are parked does not.",
    ),
    Option(
        "retry_backoff",
        1.0,
        checks.seconds(),
        "A task that must be retried later is sent again after a random time up to this, doubled"
        " with every attempt; seconds.",
    ),
    Option("retry_backoff_max", 60.0, checks.seconds(), "The longest of these times; seconds."),
    Option(
        "retry_deadline",
        None,
        checks.seconds(none=True),
        "When to give up retrying and fail: seconds for which one and the same holder has been in"
        " the way, or too few nodes have answered. Time in which the key changes hands does not"
        " count: waiting is not failing. None: never.",
    ),
    Option(
        "max_lifetime",
        DAY,
        checks.seconds(none=True),
        "How long a lock is extended at most, for tasks that hang; seconds, None for ever. Then the"
        " body is told that its lease is lost, though the ttl be longer.",
    ),
    Option(
        "fencing",
        False,
        checks.flag,
        "Give every lease a fencing token, a number that grows with each grant of its resource:"
        " what is written to can refuse the write of a holder that has been overtaken.",
    ),
)

GLOBAL: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option(
            "nodes",
            None,
            checks.nodes,
            "The independent Redis masters: URLs, clients or mappings of connection arguments."
            " If not set, the broker, where that is a Redis.",
        ),
        Option("prefix", "redlock:", checks.text, "What the keys on the nodes begin with."),
        Option(
            "node_timeout",
            0.25,
            checks.seconds(0.001),
            "How long to wait for a node's answer, never more than a tenth of the ttl; seconds.",
        ),
        Option(
            "keeper",
            "thread",
            checks.one_of("thread", "process"),
            "What extends a lock for the process that holds it: a thread of it (in a prefork worker"
            " the main process as well), or besides a small process of its own, which goes on while"
            " a C call keeps the GIL, and frees at once what a killed process held; it takes about"
            " 25 MB, and logs to stderr.",
        ),
        Option(
            "restart_guard",
            "auto",
            checks.one_of("auto", "uptime", "off"),
            "`uptime`: a node that was started more recently than the longest ttl in use has no"
            " vote, because it may have forgotten locks; unless it has `appendfsync always`. `off`:"
            " it votes. `auto`: `uptime` with three nodes or more, else `off`.",
        ),
        Option("enabled", True, checks.flag, "False: no lock anywhere, for tests."),
        Option(
            "parking",
            True,
            checks.flag,
            "A worker keeps deliveries that wait for a lock in its main process, and lets them go"
            " one after the other; none of them waits in a pool slot, none polls. False: each waits"
            " in its slot for `wait`, and is sent again after a random time.",
        ),
        Option(
            "events",
            False,
            checks.flag,
            "Send the events `task-lock-waiting`, `task-lock-acquired` and `task-lock-lost` to"
            " whoever monitors the workers, as Flower does.",
        ),
        Option(
            "beat",
            None,
            checks.flag_or_none,
            "Send each tick of a periodic task once, however many beats run. None: if"
            " `redlock_nodes` is set.",
        ),
        Option(
            "beat_on_unavailable",
            "hold",
            checks.one_of("hold", "send"),
            "If too few nodes answer a beat: hold what is due until they do, or send it, from every"
            " beat.",
        ),
        *_SHARED,
    )
}

TASK: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option(
            "key",
            None,
            checks.key,
            "What is exclusive: a template over the task's arguments, such as"
            " `order:{order_id}`; a list of templates, for all or none of several; a list of"
            " arguments' names; or a function that is called with the arguments. None: the task's"
            " name and all its arguments. See [Keys and limits](keys.md).",
        ),
        *_SHARED,
        Option(
            "scope_name",
            None,
            checks.scope_name,
            "What the key begins with, in place of the task's name: tasks that have the same share"
            " their keys. None: the task's name where there is no template, else nothing.",
        ),
        Option("limit", 1, checks.limit, "How many bodies may run at a time per key."),
        Option(
            "scope",
            "while_executing",
            checks.one_of(*SCOPES),
            "From when to when a key is taken: while the body runs; or from its publication on, by"
            " a reservation.",
        ),
        Option(
            "reserve_ttl",
            None,
            checks.seconds(MIN_TTL, none=True),
            "How long the nodes keep a reservation, counted from the message's ETA; seconds. A"
            " worker that holds the message prolongs it. None: until the message expires, else an"
            " hour. By its call (`lock=`, ETA, `expires`) it lasts for 31 days from now at most, or"
            " for as long as is declared here, if that is longer.",
        ),
        Option(
            "on_duplicate",
            "existing",
            checks.one_of(*DUPLICATE_POLICIES),
            "If another has the reservation when a task is published: return the result of that"
            " one, raise DuplicateTask, return a result that says it was skipped, or revoke the one"
            " that is queued and take its place.",
        ),
        Option(
            "hold_for",
            0.0,
            checks.hold_for,
            "How long a lock is kept at least, counted from when it was taken, though the body has"
            " ended before; seconds, at most a day.",
        ),
        Option(
            "on_conflict",
            "retry",
            checks.on_conflict,
            "If another holds the lock: send the task again later, skip it, raise ResourceHeld,"
            " wait in its pool slot for up to `wait`, reject the message (to a dead letter"
            " exchange), replace the holder (revoke it, and wait for its end); or what a function"
            " says that is given the holder and the request.",
        ),
        Option(
            "on_deadline",
            "raise",
            checks.one_of("raise", "skip", "reject"),
            "When `retry_deadline` is over, or the wait of the policies `wait` and `replace`: raise"
            " ResourceHeld (or QuorumUnavailable), skip the task, or reject its message. Refused"
            " where there is no such time.",
        ),
        Option(
            "on_unavailable",
            "retry",
            checks.one_of("retry", "raise", "run"),
            "If too few nodes answer: send the task again later, raise QuorumUnavailable, or run"
            " it without a lock.",
        ),
        Option(
            "on_lost",
            "raise",
            checks.on_lost,
            "If the lease is lost while the task runs: raise LeaseLost in it, only log it, or call"
            " a function with the lease.",
        ),
    )
}


@dataclass(frozen=True)
class TaskOptions:
    """The options of a task, all of them: its own, else the app's, else the defaults.

    Attributes:
        wait: That of the task's policy; 0 where a function is yet to be asked for one.
        waits: By policy, how long a task waits in its process that has it; seconds.
    """

    key: Any
    ttl: float
    wait: float
    retry_backoff: float
    retry_backoff_max: float
    retry_deadline: float | None
    max_lifetime: float | None
    fencing: bool
    scope_name: str | None
    limit: int
    scope: str
    reserve_ttl: float | None
    on_duplicate: str
    hold_for: float
    on_conflict: str | Callable[..., Any]
    on_deadline: str
    on_unavailable: str
    on_lost: str | Callable[..., object]
    waits: Mapping[str, float]


def guarded(restart_guard: str, nodes: int) -> bool:
    """Return whether nodes that may have forgotten locks have no vote.

    "auto" leaves one node alone: waiting after each of its starts protects from nothing but its own
    crash, and whoever runs one has accepted that. Of two, both must grant a lock: if one forgets,
    the other still says no. From three on, one that forgets is enough for two holders.
    """
    return restart_guard == "uptime" or (restart_guard == "auto" and nodes > 2)


def check_option(name: str, value: Any, label: str | None = None) -> Any:
    """The value of one option, checked.

    Args:
        name: Without prefix.
        value: What was given.
        label: What the user calls it, for the error.

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
