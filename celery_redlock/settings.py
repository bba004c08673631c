"""The options, once: name, default, unit, check.

Every option is either global (`redlock_x` in the Celery configuration), or of a task (`lock_x` on
a `SingletonTask`, `x` in `@locked`), or both: then the global one is the default of the tasks.
Durations are seconds. A value is checked at its birth: when a task is declared, when a worker
starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError

__all__ = [
    "GLOBAL",
    "TASK",
    "Option",
    "Settings",
    "TaskOptions",
    "check_option",
    "check_task_options",
    "given_names",
    "read_settings",
    "resolve",
]

MIN_TTL = 0.02
"""Seconds; below it the drift allowance and a round trip leave nothing of a lease."""
DAY = 86_400.0


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


def _seconds(least: float = 0.0, *, none: bool = False, zero: bool = False) -> Any:
    wanted = f"a number of seconds {'>=' if zero or least else '>'} {least:g}"

    def check(value: Any) -> Any:
        if value is None and none:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"must be {wanted}{', or None' if none else ''}")
        if not math.isfinite(value) or value < least or (value == 0 and not zero):
            raise ValueError(f"must be {wanted}")
        return float(value)

    return check


def _ttl(value: Any) -> float:
    seconds: float = _seconds(MIN_TTL)(value)
    if seconds > DAY:
        raise ValueError(
            f"must be at most {DAY:g} (a day): a holder that dies blocks the resource for so long;"
            " a lease is extended by itself while its task runs, so it can be short"
        )
    return seconds


def _one_of(*names: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(map(repr, names))}")
        return value

    return check


def _text(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a string that is not empty")
    return value


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def _flag_or_none(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise ValueError("must be True, False or None")
    return value


def _nodes(value: Any) -> Any:
    if value is None:
        return None
    from .address import parse_nodes  # the one check that needs redis

    parse_nodes(value, "redlock_nodes")
    return value


def _on_lost(value: Any) -> Any:
    if value in ("raise", "log") or callable(value):
        return value
    raise ValueError("must be 'raise', 'log' or a callable that takes the lease")


def _key(value: Any) -> Any:
    return None if value is None else _text(value)


_SHARED = (
    Option("ttl", 30.0, _ttl, "How long the nodes keep a lock that nobody extends; seconds."),
    Option(
        "wait",
        0.5,
        _seconds(zero=True),
        "How long a task waits in its process for a lock before the conflict policy applies;"
        " seconds. It occupies a pool slot meanwhile. A task that skips or raises on a conflict"
        " does not wait unless it says so itself.",
    ),
    Option(
        "retry_backoff",
        1.0,
        _seconds(),
        "A task that must be retried later is sent again after a random time up to this, doubled"
        " with every attempt; seconds.",
    ),
    Option("retry_backoff_max", 60.0, _seconds(), "The longest of these times; seconds."),
    Option(
        "retry_deadline",
        3600.0,
        _seconds(none=True),
        "When to give up retrying and fail, counted from the first attempt; seconds, None for"
        " never.",
    ),
    Option(
        "max_lifetime",
        DAY,
        _seconds(none=True),
        "How long a lock is extended at most, for tasks that hang; seconds, None for ever.",
    ),
    Option(
        "fencing",
        False,
        _flag,
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
            _nodes,
            "The independent Redis masters: URLs, clients or mappings of connection arguments."
            " If not set, the broker, where that is a Redis.",
        ),
        Option("prefix", "redlock:", _text, "What the keys on the nodes begin with."),
        Option(
            "node_timeout",
            0.25,
            _seconds(0.001),
            "How long to wait for a node's answer, never more than a tenth of the ttl; seconds.",
        ),
        Option(
            "keeper",
            "thread",
            _one_of("thread", "process"),
            "What extends a lock for the process that holds it: a thread of it (in a prefork worker"
            " the main process as well), or besides a small process of its own, which goes on while"
            " a C call keeps the GIL, and frees at once what a killed process held; it takes about"
            " 25 MB, and logs to stderr.",
        ),
        Option(
            "restart_guard",
            "uptime",
            _one_of("uptime", "off"),
            "A node that was started more recently than the longest ttl in use has no vote, for it"
            " may have forgotten locks; unless it has `appendfsync always`. `off`: it votes.",
        ),
        Option("enabled", True, _flag, "False: no lock anywhere, for tests."),
        Option(
            "beat",
            None,
            _flag_or_none,
            "Send each tick of a periodic task once, however many beats run. None: if"
            " `redlock_nodes` is set.",
        ),
        Option(
            "beat_on_unavailable",
            "hold",
            _one_of("hold", "send"),
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
            _key,
            "What is exclusive: a template over the task's arguments, such as"
            " `order:{order_id}`. None: the task's name and all its arguments.",
        ),
        *_SHARED,
        Option(
            "on_conflict",
            "retry",
            _one_of("retry", "skip", "raise"),
            "If another holds the lock: send the task again later, skip it, or raise ResourceHeld.",
        ),
        Option(
            "on_unavailable",
            "retry",
            _one_of("retry", "raise", "run"),
            "If too few nodes answer: send the task again later, raise QuorumUnavailable, or run"
            " it without a lock.",
        ),
        Option(
            "on_lost",
            "raise",
            _on_lost,
            "If the lease is lost while the task runs: raise LeaseLost in it, only log it, or call"
            " a function with the lease.",
        ),
    )
}


@dataclass(frozen=True)
class Settings:
    """The global options of an app, checked."""

    nodes: Sequence[Any]
    prefix: str
    node_timeout: float
    keeper: str
    restart_guard: str
    enabled: bool
    beat: bool
    beat_on_unavailable: str
    ttl: float
    wait: float
    retry_backoff: float
    retry_backoff_max: float
    retry_deadline: float | None
    max_lifetime: float | None
    fencing: bool


@dataclass(frozen=True)
class TaskOptions:
    """The options of a task, all of them: its own, else the app's, else the defaults."""

    key: str | None
    ttl: float
    wait: float
    retry_backoff: float
    retry_backoff_max: float
    retry_deadline: float | None
    max_lifetime: float | None
    fencing: bool
    on_conflict: str
    on_unavailable: str
    on_lost: str | Callable[..., object]


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


def check_task_options(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A task's own options as they were declared, checked as far as they can be by themselves.

    Args:
        given: By name, without prefix.
        prefix: What the user wrote before each name, for errors.

    Raises:
        ConfigurationError: A name is unknown or a value cannot work.
    """
    _known(given, TASK, prefix)
    checked = {name: check_option(name, value, prefix + name) for name, value in given.items()}
    _consistent(checked, prefix)
    return checked


def resolve(own: Mapping[str, Any], settings: Settings) -> TaskOptions:
    """A task's options on an app with `settings`.

    Raises:
        ConfigurationError: The task's own options contradict the app's.
    """
    options = {
        name: own.get(name, getattr(settings, name, option.default))
        for name, option in TASK.items()
    }
    if "wait" not in own and options["on_conflict"] != "retry":
        options["wait"] = 0.0  # skip or raise at once
    _consistent(options, "lock_")
    return TaskOptions(**options)


def read_settings(app: Any) -> Settings:
    """The settings of a Celery app.

    Raises:
        ConfigurationError: A value cannot work, a `redlock_...` name is unknown, or no node is
            named and the broker is no Redis.
    """
    conf = app.conf
    _known(given_names(conf), GLOBAL, "redlock_")
    # Read by name, not by app.add_defaults(): that hides a user's config_from_object.
    values = {
        name: check_option(name, conf.get(f"redlock_{name}", option.default), f"redlock_{name}")
        for name, option in GLOBAL.items()
    }
    _consistent(values, "redlock_")
    if values["beat"] is None:
        values["beat"] = values["nodes"] is not None
    if values["nodes"] is None:
        values["nodes"] = [_broker(conf)] if values["enabled"] else []
    return Settings(**values)


def given_names(conf: Any) -> list[str]:
    """The names after `redlock_` that a configuration holds, under whatever namespace."""
    keys = [str(key).lower() for key in conf]  # loads it; before that it does not know its prefix
    namespace = re.escape((getattr(conf, "prefix", "") or "").lower())
    pattern = re.compile(rf"(?:{namespace})?redlock_(\w+)")
    matches = map(pattern.fullmatch, keys)
    return [match.group(1) for match in matches if match]


def _known(names: Iterable[str], table: Mapping[str, Option], prefix: str) -> None:
    for name in names:
        if name not in table:
            import difflib  # only for a message

            near = difflib.get_close_matches(name, table, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else "there are:"
            rest = "" if near else " " + ", ".join(prefix + known for known in table)
            raise ConfigurationError(f"there is no option {prefix}{name}; {hint}{rest}")


def _consistent(values: Mapping[str, Any], prefix: str) -> None:
    base, most = values.get("retry_backoff"), values.get("retry_backoff_max")
    if base is not None and most is not None and most < base:
        raise ConfigurationError(
            f"{prefix}retry_backoff_max must be at least {prefix}retry_backoff;"
            f" they are {most:g} and {base:g}"
        )


def _broker(conf: Any) -> str:
    """The broker, where that is a Redis."""
    url = conf.get("broker_write_url") or conf.get("broker_url")
    if isinstance(url, (list, tuple)):
        url = url[0] if url else None
    if isinstance(url, str):
        url = url.split(";")[0]
        if url.startswith("redis+socket://"):
            return "unix://" + url.removeprefix("redis+socket://")
        if url.startswith(("redis://", "rediss://")):
            return re.sub(
                r"ssl_cert_reqs=CERT_(\w+)",
                lambda m: m[0].replace("CERT_" + m[1], m[1].lower()),
                url,
            )
    raise ConfigurationError(
        "redlock_nodes is not set and the broker is no Redis: set redlock_nodes to the URLs of one"
        " or more independent Redis masters, such as ['redis://10.0.0.1:6379/0', ...]"
    )
