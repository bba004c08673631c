"""What is set: an app's settings and a task's options, read, checked and put together.

A value is checked at its birth: when a task is declared, when a worker starts. Which options there
are stands in `options.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import ConfigurationError
from .checks import CONFLICT_POLICIES
from .options import GLOBAL, TASK, Option, TaskOptions, check_option

__all__ = [
    "Settings",
    "check_deadline",
    "check_locking",
    "check_reserving",
    "check_several",
    "check_task_options",
    "enabled",
    "given_names",
    "read_settings",
    "resolve",
]


switched_off = 0
"""How many blocks of a test want no task to take a lock, of whichever app: see `testing`."""


@dataclass(frozen=True)
class Settings:
    """The global options of an app, checked."""

    nodes: Sequence[Any]
    prefix: str
    node_timeout: float
    keeper: str
    restart_guard: str
    enabled: bool
    parking: bool
    events: bool
    beat: bool
    beat_on_unavailable: str
    ttl: float
    wait: float
    retry_backoff: float
    retry_backoff_max: float
    retry_deadline: float | None
    max_lifetime: float | None
    fencing: bool


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
    _consistent(options, "lock_")
    # As long as what a dead machine holds can last; the others act at once.
    waits = {"retry": options["wait"], "wait": options["ttl"], "replace": options["ttl"]}
    waits = {name: own.get("wait", waits.get(name, 0.0)) for name in CONFLICT_POLICIES}
    policy = options["on_conflict"]
    options["wait"] = 0.0 if callable(policy) else waits[policy]
    return TaskOptions(**options, waits=waits)


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
        values["nodes"] = [_moved(conf) or _broker(conf)] if values["enabled"] else []
    return Settings(**values)


def enabled(conf: Any) -> bool:
    """Whether the tasks of an app with this configuration take locks at all."""
    return not switched_off and bool(conf.get("redlock_enabled", True))


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


def check_several(values: Mapping[str, Any], prefix: str) -> None:
    """Refuse what is of a single resource, for a task with several.

    Raises:
        ConfigurationError: It has a limit or a fencing token.
    """
    if values.get("limit", 1) > 1:
        raise ConfigurationError(
            f"{prefix}limit is of one key, and this task locks several: leave one of the two out"
        )
    if values.get("fencing"):
        raise ConfigurationError(
            f"{prefix}fencing: a fencing token is of one key, and its numbers grow with the grants"
            " of that one alone; this task locks several. Give it fencing=False"
        )


def _consistent(values: Mapping[str, Any], prefix: str) -> None:
    base, most = values.get("retry_backoff"), values.get("retry_backoff_max")
    if base is not None and most is not None and most < base:
        raise ConfigurationError(
            f"{prefix}retry_backoff_max must be at least {prefix}retry_backoff;"
            f" they are {most:g} and {base:g}"
        )
    scope, limit = values.get("scope", "while_executing"), values.get("limit", 1)
    if limit > 1 and scope not in ("while_executing", "until_and_while_executing"):
        raise ConfigurationError(
            f"{prefix}limit is {limit}, but with {prefix}scope {scope!r} there is one task per key:"
            " for several at a time and one in the queue use 'until_and_while_executing'"
        )
    if limit > 1 and values.get("on_conflict") == "replace":
        raise ConfigurationError(
            f"{prefix}on_conflict 'replace' revokes the holder, and with {prefix}limit={limit}"
            f" there are {limit}, all of whom it may revoke for one place: use 'wait', or leave"
            f" {prefix}limit out"
        )
    if scope == "until_expired" and values.get("on_duplicate") == "replace":
        raise ConfigurationError(
            f"{prefix}on_duplicate 'replace' cannot be had with {prefix}scope 'until_expired':"
            " the key is kept whatever becomes of its task, so nobody takes its place; use"
            " 'until_executed', or another of 'existing', 'raise', 'skip'"
        )
    if values.get("fencing") and values.get("limit", 1) > 1:
        raise ConfigurationError(
            f"{prefix}limit lets several work at a time, and a fencing token would refuse the"
            f" writes of all but the last; with {prefix}limit={values['limit']} give"
            f" {prefix}fencing=False"
        )


def check_reserving(given: Mapping[str, Any], prefix: str) -> None:
    """Options of a reservation need a scope that reserves.

    Raises:
        ConfigurationError: There is one without.
    """
    for name in ("reserve_ttl", "on_duplicate"):
        if name in given and given.get("scope", "while_executing") == "while_executing":
            raise ConfigurationError(
                f"{prefix}{name} is for a reservation, and {prefix}scope 'while_executing' takes"
                f" none: set {prefix}scope to 'until_executed' or another that begins with 'until'"
            )


def check_locking(given: Mapping[str, Any], prefix: str) -> None:
    """Options of the lock that a body runs under need a scope that has one.

    Raises:
        ConfigurationError: There is one without.
    """
    if given.get("scope") != "until_executing":
        return
    for name in ("on_conflict", "on_deadline", "on_lost", "hold_for", "fencing"):
        if given.get(name, TASK[name].default) != TASK[name].default:
            raise ConfigurationError(
                f"{prefix}{name} is {given[name]!r}, but with {prefix}scope 'until_executing' the"
                f" body runs under no lock, and nothing reads it: leave it out, or set"
                f" {prefix}scope to 'until_and_while_executing'"
            )


def check_deadline(given: Mapping[str, Any], options: TaskOptions, prefix: str) -> None:
    """What is to be done at a deadline needs one: of retrying, or the wait of a policy.

    Args:
        given: What was declared of this task.
        options: All of its options.
        prefix: What the user wrote before each name, for errors.

    Raises:
        ConfigurationError: There is none.
    """
    end, policy = given.get("on_deadline", "raise"), options.on_conflict
    waits = callable(policy) or policy in ("wait", "replace")
    if end != "raise" and not waits and options.retry_deadline is None:
        raise ConfigurationError(
            f"{prefix}on_deadline is {end!r}, but there is no deadline: with {prefix}on_conflict"
            f" {policy!r} it is {prefix}retry_deadline (or redlock_retry_deadline), which is None."
            f" Set that to the seconds after which to give up, or leave {prefix}on_deadline out"
        )


def _moved(conf: Any) -> str | None:
    """The Redis of celery-once or celery-singleton, where a project moves over (compat/).

    Read wherever the locks are, so that all processes of an app agree whichever modules they load.
    """
    once = conf.get("ONCE")
    own = once.get("settings") if isinstance(once, Mapping) else None
    url = own.get("url") if isinstance(own, Mapping) else None
    url = url or conf.get("singleton_backend_url")
    return _as_node(url) if isinstance(url, str) else None


def _broker(conf: Any) -> str:
    """The broker, where that is a Redis."""
    url = conf.get("broker_write_url") or conf.get("broker_url")
    if isinstance(url, (list, tuple)):
        url = url[0] if url else None
    if isinstance(url, str):
        url = _as_node(url.split(";")[0])
        if url.startswith(("unix://", "redis://", "rediss://")):
            return url
    raise ConfigurationError(
        "redlock_nodes is not set and the broker is no Redis: set redlock_nodes to the URLs of one"
        " or more independent Redis masters, such as ['redis://10.0.0.1:6379/0', ...]"
    )


def _as_node(url: str) -> str:
    """A URL as Celery writes them, as redis-py does."""
    if url.startswith("redis+socket://"):
        return "unix://" + url.removeprefix("redis+socket://")
    return re.sub(
        r"ssl_cert_reqs=CERT_(\w+)",
        lambda m: m[0].replace("CERT_" + m[1], m[1].lower()),
        url,
    )
