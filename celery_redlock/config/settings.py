"""Read, check and combine an app's settings and a task's options.

Values are checked as early as possible: when a task is declared, or when a worker starts.
`options.py` has the table of options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..protocol.errors import ConfigurationError
from .checks import CONFLICT_POLICIES, allows_several
from .default_node import default_node
from .options import GLOBAL, TASK, Option, Settings, TaskOptions, check_option

RETRY_OPTIONS = ("retry_backoff", "retry_backoff_max", "retry_deadline", "on_deadline")
"""Options that are only read by a task that may be sent again."""
_LEASE_OPTIONS = ("max_lifetime", "progress_timeout", "on_lost")
NOT_WITH_RATE = ("limit", "hold_for", *_LEASE_OPTIONS)
"""Options that no task with a rate reads, because its bodies hold no lock."""
LOCK_OPTIONS = ("wait", "on_conflict", "hold_for", "fencing", *_LEASE_OPTIONS)
"""Options that are only read by a task whose body runs under its lock."""

FOREIGN_NAMES = {
    **dict.fromkeys(("timeout", "expire", "expires", "expiry", "lock_timeout"), "ttl"),
    "blocking_timeout": "wait",
}
"""The names of our options in other libraries."""


UNREAD = object()
"""The value of a setting whose spelling Celery's configuration does not read."""

_MIN_LIKENESS = 0.8
"""Minimum similarity to "redlock" (difflib's ratio, 0 to 1) at which a first word counts as a
misspelling of it."""

switched_off = 0
"""The number of open test blocks in which no task of any app takes a lock: see `testing`."""


def check_given(given: Mapping[str, Any], table: Mapping[str, Option], prefix: str) -> Any:
    """Check each of the given options by itself, and return them by name without prefix.

    Raises:
        ConfigurationError: A name is not in the table, or a value cannot work.
    """
    for name in given:
        if name not in table:
            import difflib  # imported here: only the error needs it

            bare = name.removeprefix("redlock_").removeprefix("lock_")
            bare = FOREIGN_NAMES.get(bare, bare)
            near = [bare] if bare in table else difflib.get_close_matches(name, table, n=1)
            known = ", ".join(prefix + name for name in table)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are: {known}"
            raise ConfigurationError(f"there is no option {prefix}{name}; {hint}")
    return {name: check_option(name, value, prefix + name) for name, value in given.items()}


def resolve(own: Mapping[str, Any], settings: Settings) -> TaskOptions:
    """Return a task's options on an app with `settings`."""
    options = {
        name: own.get(name, getattr(settings, name, option.default))
        for name, option in TASK.items()
    }
    # `wait` and `replace` wait as long as a dead holder's lock can last; others act at once.
    waits = {"retry": options["wait"], "wait": options["ttl"], "replace": options["ttl"]}
    waits = {name: own.get("wait", waits.get(name, 0.0)) for name in CONFLICT_POLICIES}
    policy = options["on_conflict"]
    options["wait"] = 0.0 if callable(policy) else waits[policy]
    return TaskOptions(**options, waits=waits)


def read_settings(app: Any, *, nodes: bool = True) -> Settings:
    """Return the settings of a Celery app.

    Args:
        app: The app.
        nodes: False to leave its nodes out: a program that only publishes may lack their client.

    Raises:
        ConfigurationError: A value cannot work, a `redlock_...` name is unknown, or no node is
            configured and the broker is not Redis.
    """
    conf = app.conf
    # Read by name: app.add_defaults() would hide a user's config_from_object.
    given = {name: option.default for name, option in GLOBAL.items()}
    given.update((name, conf.get(f"redlock_{name}", UNREAD)) for name in given_names(conf))
    for name, value in given.items():
        if value is UNREAD:
            right = f"redlock_{name}"
            right = f"{_namespace(conf)}{right}".upper() if _namespace(conf) else right
            raise ConfigurationError(
                f"the setting REDLOCK_{name.upper()} is read by nothing, as Celery reads names in"
                " capitals only with its namespace before them, as config_from_object(...,"
                f" namespace='CELERY') gives it: write {right}"
            )
    _refuse_misspelt(conf)
    if not nodes:
        given["nodes"] = None
    values = check_given(given, GLOBAL, "redlock_")
    check_together(values, {}, "redlock_")
    if values["nodes"] is None:
        values["nodes"] = [default_node(app)] if values["enabled"] and nodes else []
    return Settings(**values)


def page_address(app: Any, page: str, anchor: str = "", docs: str | None = None) -> str:
    """Return the address of a page, by the option `docs` if given; else by that of the app, if any.

    Raises:
        ConfigurationError: As `read_settings`.
    """
    shape = docs or (GLOBAL["docs"].default if app is None else read_settings(app).docs)
    return str(shape.replace("{page}", page)) + (f"#{anchor}" if anchor else "")


def unread(conf: Any) -> list[str]:
    """Return a warning for each setting of a configuration that looks like a task's option.

    An example is `lock_ttl`, which may belong to another library.
    """
    return [
        f"celery_redlock does not read the setting lock_{name}:"
        f" {f'for all tasks, set redlock_{name}; ' if name in GLOBAL else ''}for one, give"
        f" lock_{name} to the task. If another library or a lock of your own reads it, ignore this"
        " line"
        for name in given_names(conf, "lock_")
        if name in TASK and conf.get(f"lock_{name}", UNREAD) is not UNREAD
    ]


def _refuse_misspelt(conf: Any) -> None:
    """Refuse a setting whose first word is `redlock` misspelt, as in `redlok_nodes`.

    Raises:
        ConfigurationError: There is such a setting. The message says what to write.
    """
    pattern = re.compile(rf"(?:{_namespace(conf)}|celery_)?(red_lock|r[a-z]{{4,8}})_(\w+)", re.I)
    for found in filter(None, map(pattern.fullmatch, map(str, conf))):
        written, first, option = found[0], found[1].lower(), found[2].lower()
        if first == "redlock":
            continue
        import difflib  # imported here: most programs have no such name

        if difflib.SequenceMatcher(None, first, "redlock").ratio() < _MIN_LIKENESS:
            continue
        for meant in difflib.get_close_matches(option, GLOBAL, n=1):
            right = f"redlock_{meant}"
            if written.isupper():
                right = f"{_namespace(conf)}{right}".upper()
            raise ConfigurationError(f"nothing reads the setting {written}: write {right}")


def _namespace(conf: Any) -> str:
    """Return the prefix of all names in capitals, such as `CELERY_`, escaped for a pattern."""
    return re.escape(getattr(conf, "prefix", "") or "")


def enabled(conf: Any) -> bool:
    """Return True if the tasks of an app with this configuration take locks at all."""
    if switched_off:
        return False
    maps = getattr(conf, "maps", ())
    # This short way is for speed: it is called at each task call, the setting is nearly always
    # unset, and Celery's look-up would raise nine errors first. With one map the configuration is
    # not loaded yet, and with a prefix the name is another one.
    if len(maps) > 1 and conf.prefix is None and not any("redlock_enabled" in one for one in maps):
        return True
    return bool(conf.get("redlock_enabled", True))


def given_names(conf: Any, before: str = "redlock_") -> list[str]:
    """Return the names after `redlock_` in a configuration, with any namespace before it."""
    keys = [str(key).lower() for key in conf]  # this loads it; before, its prefix is not known
    pattern = re.compile(rf"(?:{_namespace(conf)}|celery_)?{before}(\w+)", re.I)
    matches = map(pattern.fullmatch, keys)
    return [match.group(1) for match in matches if match]


def check_together(
    values: Mapping[str, Any], given: Mapping[str, Any], prefix: str, *, several: bool = False
) -> None:
    """Refuse options that contradict each other, or that nothing would read.

    Args:
        values: The options known so far: those declared with the task, or, with its app, all.
        given: The options that were given to this task alone. Only these must be read; a default
            for all tasks need not be.
        prefix: The prefix that the user wrote before each name, for errors.
        several: True if the task locks several keys.

    Raises:
        ConfigurationError: The message says which options, why, and what to give instead.
    """
    p = prefix
    base, longest = values.get("retry_backoff"), values.get("retry_backoff_max")
    if base is not None and longest is not None and longest < base:
        raise ConfigurationError(
            f"{p}retry_backoff_max must be at least {p}retry_backoff;"
            f" they are {longest:g} and {base:g}"
        )
    if not values.get("parking", True) and (
        values["parking_memory"] != GLOBAL["parking_memory"].default
    ):
        raise ConfigurationError(
            f"{p}parking_memory is {values['parking_memory']}, but {p}parking is False, so that"
            " nothing is parked and nothing reads it: leave one of the two out"
        )
    silence, lifetime = values.get("progress_timeout"), values.get("max_lifetime")
    if silence is not None and lifetime is not None and silence >= lifetime:
        raise ConfigurationError(
            f"{p}progress_timeout is {silence:g}, but a lock is lost after {p}max_lifetime,"
            f" {lifetime:g} s, in any case: give a shorter one, or leave it out"
        )
    scope, limit = values.get("scope", "while_executing"), values.get("limit", 1)
    policy, fencing = values.get("on_conflict", "retry"), values.get("fencing", False)
    many, shown = allows_several(limit), "a function" if callable(limit) else limit
    if many and scope not in ("while_executing", "until_and_while_executing"):
        raise ConfigurationError(
            f"{p}limit is {shown}, but with {p}scope {scope!r} there is one task per key: for"
            " several at a time and one in the queue use 'until_and_while_executing'"
        )
    if many and policy == "replace":
        raise ConfigurationError(
            f"{p}on_conflict 'replace' revokes the holder, and with {p}limit={shown} it could"
            f" revoke all holders to get one place: use 'wait', or leave {p}limit out"
        )
    if many and fencing:
        raise ConfigurationError(
            f"{p}limit lets several work at a time, and a fencing token would refuse the writes of"
            f" all but the last; with {p}limit={shown} give {p}fencing=False"
        )
    if values.get("shared"):
        _check_shared(values, p, several=several)
    if values.get("burst") is not None and values.get("rate") is None:
        raise ConfigurationError(
            f"{p}burst says how many of a rate may start at once, and there is no {p}rate: set it,"
            f" as in {p}rate='10/m', or leave {p}burst out"
        )
    if values.get("rate") is not None:
        _check_rate(values, given, p, several=several)
    if fencing and several:
        raise ConfigurationError(
            f"{p}fencing: the numbers of a fencing token grow with the grants of one key, and this"
            f" task locks several. Give it {p}fencing=False (redlock_fencing sets it for all tasks)"
        )
    keeps = {
        "until_expired": "the key is kept whatever becomes of its task",
        "until_succeeded": "the key may be kept for a task that has succeeded",
    }
    if scope in keeps and values.get("on_duplicate") == "replace":
        raise ConfigurationError(
            f"{p}on_duplicate 'replace' is not available with {p}scope {scope!r}: {keeps[scope]},"
            " so no task takes its place; use 'until_executed', or another of 'existing', 'raise',"
            " 'skip'"
        )
    for name in ("reserve_ttl", "on_duplicate"):
        if name in given and scope == "while_executing":
            raise ConfigurationError(
                f"{p}{name} applies to a reservation, and {p}scope 'while_executing' makes none:"
                f" set {p}scope to 'until_executed' or another that begins with 'until'"
            )
    for name in (*RETRY_OPTIONS, *LOCK_OPTIONS):
        asked = given.get(name, TASK[name].default)
        if scope == "until_executing" and asked != TASK[name].default:
            raise ConfigurationError(
                f"{p}{name} is {asked!r}, but with {p}scope 'until_executing' the body runs under"
                f" no lock, and nothing reads it: leave it out, or set {p}scope to"
                " 'until_and_while_executing'"
            )
    waits = callable(policy) or policy in ("wait", "replace")
    retries = callable(policy) or "retry" in (policy, values.get("on_unavailable", "retry"))
    for name in RETRY_OPTIONS:
        if name not in given or given[name] == TASK[name].default or retries:
            continue
        if name == "on_deadline" and waits:
            continue
        raise ConfigurationError(
            f"{p}{name} is {given[name]!r}, but with {p}on_conflict {policy!r} and"
            f" {p}on_unavailable {values['on_unavailable']!r} the task is never sent again, and"
            f" nothing reads it: leave it out, or set one of the two to 'retry'"
        )
    end = given.get("on_deadline", "raise")
    if end != "raise" and not waits and values.get("retry_deadline", 0) is None:
        raise ConfigurationError(
            f"{p}on_deadline is {end!r}, but there is no deadline: with {p}on_conflict {policy!r}"
            f" it is {p}retry_deadline (or redlock_retry_deadline), which is None. Set that to the"
            f" seconds after which to give up, or leave {p}on_deadline out"
        )


def _check_shared(values: Mapping[str, Any], p: str, *, several: bool) -> None:
    """Refuse options that a reader cannot have."""
    scope = values.get("scope", "while_executing")
    either = "leave one of the two out"
    refused = {
        f"several keys: {either}": several,
        f"{p}limit: {either}": values.get("limit", 1) != 1,
        f"{p}rate: {either}": values.get("rate") is not None,
        f"{p}fencing, which refuses the writes of all but the last: give {p}fencing=False"
        " (redlock_fencing sets it for all tasks)": values.get("fencing"),
        f"{p}scope {scope!r}, which keeps other copies out: {either}": scope != "while_executing",
        f"{p}on_conflict 'replace': give another": values.get("on_conflict") == "replace",
    }
    for what, is_so in refused.items():
        if is_so:
            raise ConfigurationError(
                f"{p}shared lets any number of readers in, and is not available with {what}"
            )


def _check_rate(
    values: Mapping[str, Any], given: Mapping[str, Any], p: str, *, several: bool
) -> None:
    """Refuse options that a task with a rate cannot have, because its bodies hold no lock."""
    from ..protocol.rate import rate_of  # imported here: most programs have no rate

    scope, policy = values.get("scope", "while_executing"), values.get("on_conflict", "retry")
    why = ""
    try:
        rate_of(values["rate"], values.get("burst"))
    except ValueError as error:
        why = p + str(error)
    if several:
        why = f"{p}rate counts the starts of one key, and this task locks several: leave one out"
    elif scope == "until_executing":
        why = (
            f"{p}rate is not available with {p}scope 'until_executing', under which a body asks for"
            " nothing: 'until_and_while_executing' is the same with a rate"
        )
    elif policy == "replace":
        why = (
            f"{p}on_conflict 'replace' revokes a holder, and with {p}rate nobody holds anything: to"
            " revoke one takes no start back. Use 'retry', 'skip', 'raise' or 'reject'"
        )
    elif values.get("on_duplicate") == "replace" and scope == "until_executed":
        why = (
            f"{p}on_duplicate 'replace' needs to know whether a body runs, and with {p}rate none"
            " holds a lock that says so: use scope 'until_and_while_executing'"
        )
    elif values.get("fencing"):
        why = (
            f"{p}rate lets bodies overlap, and a fencing token would refuse the writes of all but"
            f" the last: with {p}rate give {p}fencing=False"
        )
    for name in () if why else NOT_WITH_RATE:
        if given.get(name, TASK[name].default) != TASK[name].default:
            why = (
                f"{p}rate says when bodies start, and they hold no lock while they run, so nothing"
                f" reads {p}{name}: leave one of the two out. For both, take a lock in the body:"
                " with redlock.lock(...)"
            )
    if why:
        raise ConfigurationError(why)
