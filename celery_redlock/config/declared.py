"""Refuse options of a lock that nothing would read.

`lock_ttl` is read on a `SingletonTask`, and `@locked` reads its arguments. On any other task such
an option is an ordinary attribute: the task would run without the lock, or without the ttl, that
its source shows. So tasks are checked when they are bound to their app. A task without a lock of
ours may have the option for another library; then it only gets a warning.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any

from celery import _state
from celery.app.task import Task
from celery.utils.functional import firstmethod

from ..keys.signature import has_copy
from ..protocol.errors import ConfigurationError
from ..protocol.texts import event
from .checks import long_ttl_warning
from .default_node import is_fallback
from .options import TASK
from .task_lock import TaskLock, lock_of

MIN_LIKENESS, MIN_LIKENESS_SAME_LENGTH = 0.8, 0.66
"""Minimum similarity to an option's name (difflib's ratio, 0 to 1) at which a name counts as a
misspelling of it: `tll` has 0.67 to `ttl`, and the same length. Other names are the user's own."""

_DROPS = (
    "which would drop the message that a waiting task is sent again in. Take that base away, or the"
    " lock of celery_redlock (docs/migrating.md)"
)
_OTHER_BASES = {
    "celery_once": f"celery-once, {_DROPS}",
    "celery_singleton": f"celery-singleton, {_DROPS}",
    "celery_batches": (
        "celery-batches, which calls its body for many messages at once: no message could wait for"
        " its key. Take the lock away, and use `Redlock.from_app(app).lock(...)` in the body"
    ),
}
"""The reasons why a task with a lock of ours cannot have a base of these packages."""

logger = logging.getLogger("celery_redlock.task")

_celery_state: Any = _state  # its stubs lack most of it

_annotate_any: Any = firstmethod("annotate_any")  # type: ignore[arg-type]  # its stubs are wrong


def refuse_unread(task: Any, for_all: Mapping[str, Any] | None = None) -> list[str]:
    """Refuse lock options, on a task with a lock or on its class, that nothing reads.

    Options that `task_annotations` gives to every task (`for_all`) are defaults for the tasks that
    read them. They are refused only on a `@locked` task, where they would seem to work; a task
    without a lock gets no warning for them.

    Returns:
        A warning for each such option on a task without a lock. It may belong to another library,
        or to a lock of the project's own.

    Raises:
        ConfigurationError: There is such an option, or the task also has a lock of another library.
            The message gives the option, the task, and what to write instead.
    """
    kind = task if inspect.isclass(task) else type(task)
    if is_celery_builtin(kind):
        return []
    name = getattr(task, "name", None) or f"{task.__module__}.{task.__qualname__}"
    locked = _is_locked(task.run)
    based = isinstance(getattr(kind, "redlock", None), TaskLock)
    if locked or based:
        refuse_other_base(name, kind)
    if based:
        if locked:
            raise ConfigurationError(
                f"{name} is a SingletonTask and @locked: a task has one lock. Give the options of"
                " @locked to the task (lock_key, lock_ttl, ...) and take @locked away, or take"
                " another base"
            )
        return []  # its options are checked already
    warnings = []
    for base in kind.__mro__:
        for attribute, value in vars(base).items():
            option = _option_named(attribute)
            if option is None or _is_method(base, value):
                continue
            if locked:
                raise ConfigurationError(
                    f"{name}: nothing reads {attribute}, because the task is @locked: write"
                    f" @locked(..., {option}=...). From task_annotations, a SingletonTask alone"
                    f" takes lock_{option}; redlock_... settings are the defaults of all tasks"
                )
            if not for_all or attribute not in for_all or for_all[attribute] != value:
                warnings.append(
                    f"{name}: celery_redlock does not read {attribute}, because the task takes no"
                    f" lock of it: give it base=SingletonTask and lock_{option}=..., or put"
                    f" @locked(..., {option}=...) over its function. If another library or a lock"
                    " of your own reads it, ignore this line"
                )
    return warnings


def refuse_other_base(name: str, kind: type) -> None:
    """Refuse a base of another library for a task with a lock of ours.

    Args:
        name: The task's name, for the error.
        kind: Its class.

    Raises:
        ConfigurationError: There is such a base. The message says why the two do not work together.
    """
    for base in kind.__mro__:
        why = _OTHER_BASES.get(str(base.__module__).partition(".")[0])
        if why is not None:
            raise ConfigurationError(
                f"{name} has a lock of celery_redlock, and its class derives from"
                f" {base.__qualname__} of {why}"
            )


def check_bound(task: Any) -> None:
    """Check the key of a `@locked` task with `bind=True`, whose `self` is not an argument.

    Raises:
        ConfigurationError: The key does not fit the arguments.
    """
    function = inspect.getattr_static(task, "run")
    if _is_locked(function) and not isinstance(function, staticmethod):
        function.__redlock__.check(task.name, function, bound=True)


def refuse_second_lock(name: str, function: Any) -> None:
    """Refuse a second `@locked` on one function, because its key would be ambiguous."""
    if _is_locked(function):
        raise ConfigurationError(
            f"{name} is @locked twice: a task has one lock. Keep one of the two; several keys stand"
            " in one @locked('a:<x>', 'b:<y>')"
        )


def given_to_all(app: Any) -> Mapping[str, Any]:
    """Return the attributes that `task_annotations` of an app gives to every task (`"*"`)."""
    given: Mapping[str, Any] | None = _annotate_any(app.annotations)
    return given or {}


def app_of(lock: TaskLock, task: Any = None) -> Any:
    """Return the app whose settings a call reads.

    Args:
        lock: The lock of the called task or function.
        task: The task; None if its function is called directly, or is not a task's.
    """
    app = task.app if task is not None else _celery_state.get_current_app()
    if task is not None and not is_fallback(app):
        return app
    known = [one for one in lock.apps if not is_fallback(one)]
    if task is None and len(known) == 1:
        return known[0]
    if not is_fallback(app):
        return app
    if not known:
        known = [one for one in _celery_state._get_active_apps() if not is_fallback(one)]
    if task is not None:  # the key may contain its name, and another app may not have that name
        known = [one for one in known if task.name in one.tasks]
    return known[0] if len(known) == 1 else app


def wrap(task_class: Any = Task) -> None:
    """Wrap `Task.bind`, to check every task when it is bound to an app. Idempotent."""
    original = task_class.bind.__func__
    if getattr(original, "__redlock__", False):
        return

    @functools.wraps(original)
    def bind(cls: Any, app: Any) -> Any:
        try:
            first = not cls.__bound__
            _restore_argument_check(cls, app)
            # Check before the annotations are set, because they may hide declared options.
            warnings = refuse_unread(cls) if first else []
            bound = original(cls, app)
            warnings += refuse_unread(cls, given_to_all(app))
            check_bound(cls)
            lock = lock_of(cls)
            if lock is not None:
                lock.apps.add(app)
                lock.names.add(cls.name)
                lock.check_app(app, cls.name)
            if lock is not None and (said := long_ttl_warning(lock.own.get("ttl", 0.0))):
                warnings.append(f"{cls.name}: {said}")
            if lock is not None and lock.misfit:
                warnings.append(lock.misfit)
            for warning in dict.fromkeys(warnings if first else ()):
                logger.warning("%s", warning, extra=event("configuration_warning"))
        except ConfigurationError as error:
            _end_command(error)
            raise
        return bound

    bind.__redlock__ = True  # type: ignore[attr-defined]
    task_class.bind = classmethod(bind)


def _restore_argument_check(task: Any, app: Any) -> None:
    """Make Celery check a call's arguments as if there were no `@locked` under another decorator.

    `functools.wraps` has given that decorator the signature of the function from `@locked`.
    """
    run = inspect.getattr_static(task, "run")
    function: Any = run.__func__ if isinstance(run, staticmethod) else run
    if "__header__" in vars(task) and has_copy(function):
        del function.__signature__
        task.__header__ = app.type_checker(function, bound=function is run)


def _end_command(error: ConfigurationError) -> None:
    """End a `celery` command, such as `celery worker`, with one line that explains the error.

    Celery makes its tasks while it imports the app, or before a worker's first signal. An error
    that is raised there would be printed with its traceback.
    """
    click: Any = sys.modules.get("click")
    context = click.get_current_context(silent=True) if click is not None else None
    root = context.find_root() if context is not None else None
    # Our own commands print the error themselves.
    if root is not None and root.command.name == "celery" and root.invoked_subcommand != "redlock":
        click.echo(f"celery_redlock: {error}", err=True)
        raise SystemExit(1)


def is_celery_builtin(kind: type) -> bool:
    """Return True if a task's class is one of Celery's own tasks, such as `celery.chord_unlock`.

    They take no lock, even if the app's task class would give them one.
    """
    return kind.__module__ == "celery.app.builtins"


def keep_task_class(cls: Any) -> None:
    """Add the task class of an app to the bases of `cls`, if Celery has left it out.

    Celery leaves it out for each task with a base of its own. For an app with a `task_cls` it
    leaves out Django's task class.
    """
    made = vars(cls)
    if "_decorated" in made:
        kept = made["app"].Task
        kept = kept.__base__ if "_app" in vars(kept) else kept  # made by Celery for this app
    elif "_app" in made and any(
        "django" in str(type(one).__module__) for one in made["_app"]._fixups
    ):
        from celery.contrib.django.task import DjangoTask as kept
    else:
        return
    if issubclass(cls, kept):
        return
    bases = [base for base in cls.__bases__ if not issubclass(kept, base)]
    try:
        cls.__bases__ = (*bases, kept)
    except TypeError as error:
        name = getattr(cls, "name", cls.__qualname__)
        raise ConfigurationError(
            f"{name}: its base {cls.__base__.__qualname__} and its app's task class"
            f" {kept.__qualname__} cannot be combined ({error}): give it a base that derives from"
            " both"
        ) from None


def _is_locked(function: Any) -> bool:
    return isinstance(getattr(function, "__redlock__", None), TaskLock)


def _option_named(attribute: str) -> str | None:
    """Return the option that an attribute's name means; None if it is the user's own."""
    prefix, _, name = attribute.partition("_")
    if prefix not in ("lock", "redlock"):
        return None
    like = {option: difflib.SequenceMatcher(None, name, option).ratio() for option in TASK}
    best = max(like, key=like.__getitem__)
    least = MIN_LIKENESS_SAME_LENGTH if len(best) == len(name) else MIN_LIKENESS
    return best if like[best] >= least else None


def _is_method(base: Any, value: Any) -> bool:
    """Return True for a method of a class body; a function passed to `@app.task` is an option."""
    return hasattr(type(value), "__get__") and "_decorated" not in vars(base)
