"""The arguments that calls of a task have: its function's signature, seen through decorators.

A decorator that uses `functools.wraps` may add arguments that no call has, such as a database
session, and nothing declares them. They are found if a call can be read in one way only.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..protocol.errors import ConfigurationError
from .canonical import is_model

WAYS = 4
"""The number of ways in which `misfits` calls a function."""


class CallSignature(inspect.Signature):
    """The signature of the object that `@locked` returns, for Celery's check of a call's arguments.

    It is that of the outermost decorator under `@locked`, because Celery does not look behind one.

    Attributes:
        owner: The object it was made for. A decorator over `@locked` has a reference to it, too.
    """

    owner: Any = None

    @classmethod
    def made_for(cls, owner: Any, function: Callable[..., Any]) -> None:
        """Give `owner` the signature of the function that it calls."""
        own = inspect.signature(function, follow_wrapped=False)
        owner.__signature__ = made = cls(list(own.parameters.values()))
        made.owner = owner

    def replace(self, **given: Any) -> Any:
        """Return a plain signature, not one of this class, for a decorator's own arguments."""
        return inspect.Signature(list(self.parameters.values())).replace(**given)


def has_copy(function: Any) -> bool:
    """Return True if a decorator over `@locked` shows the signature of that, not one of its own."""
    given = vars(function).get("__signature__") if hasattr(function, "__dict__") else None
    return isinstance(given, CallSignature) and given.owner is not function


def signature_of(
    task_name: str, function: Any, bound: bool = False
) -> tuple[inspect.Signature, bool]:
    """Return the signature of a task's function, without the task itself.

    Returns:
        The signature, and True if decorators over the function may add some of its arguments.

    Raises:
        ConfigurationError: The function is bound and has no parameter for the task.
    """
    if isinstance(function, types.MethodType) and hasattr(function, "__wrapped__"):
        function, bound = function.__func__, True
    hidden = False
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        given = getattr(function, "__signature__", None)
        ours = isinstance(given, CallSignature)
        if given is not None and not ours:
            break  # the decorator declares its arguments itself
        made_by = getattr(function, "__globals__", {}).get("__name__", "")
        if not str(made_by).startswith("celery."):  # Celery's own decorators add no arguments
            hidden = hidden or not ours or has_copy(function)
        function = inner
    signature = inspect.signature(function)
    return (_without_task(task_name, signature) if bound else signature), hidden


def _without_task(task_name: str, signature: inspect.Signature) -> inspect.Signature:
    first, *others = signature.parameters.values() or (None,)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise ConfigurationError(
            f"{task_name} is bound (bind=True), so its function needs a first parameter: self"
        )
    if first.kind is first.VAR_POSITIONAL:  # "*args" includes the task, and stays
        return signature
    return signature.replace(parameters=others)


def bind_hidden(
    task_name: str,
    signature: inspect.Signature,
    used: Collection[str],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Mapping[str, object]:
    """Return the arguments of a call by their names, where a decorator adds some of them.

    Args:
        used: The names that a key is made of. No decorator may add these.

    Raises:
        TypeError: The arguments do not fit in any way.
        ConfigurationError: They fit in several ways; the text says what to write.
    """
    parameters = list(signature.parameters.values())
    kwargs = {name: value for name, value in kwargs.items() if name in signature.parameters}
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # First reading: the decorator adds its arguments by name, or after those of the call.
    behind = _arguments(signature.bind_partial(*args, **kwargs))
    readings = [behind] if all(name in behind for name in used) else []
    optional = any(p.default is not p.empty or p.kind is p.VAR_POSITIONAL for p in parameters)
    for count, first in enumerate(by_place, 1):  # second reading: before those of the call
        if not args or first.name in used or first.name in kwargs:
            break
        try:
            before = signature.replace(parameters=parameters[count:]).bind(*args, **kwargs)
        except TypeError:
            continue
        # With optional arguments, a call with one more would look as if it had all of them.
        readings += [_arguments(before), {}] if optional else [_arguments(before)]
        break
    if readings and all(one.get(name) == readings[0][name] for one in readings for name in used):
        return readings[0]
    names = ", ".join(signature.parameters)
    raise ConfigurationError(
        f"{task_name}: a call does not give all of its function's arguments ({names}), and which"
        " of them a decorator gives is not known. Let the key name arguments of the call and give"
        " these by name, or give the decorator's wrapper a __signature__ without its own arguments"
        " (docs/keys.md)"
    )


def _arguments(bound: inspect.BoundArguments) -> dict[str, object]:
    bound.apply_defaults()
    return dict(bound.arguments)


def misfits(task: inspect.Signature, key: inspect.Signature) -> list[str]:
    """Return the ways in which a key function cannot be called although its task can."""
    by_place, by_name = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in task.parameters.values()):
        return []  # only its calls show which arguments it accepts
    given = [p for p in task.parameters.values() if p.kind in (by_place, either, by_name)]
    needed = [p for p in given if p.default is p.empty]
    found = []
    for names, what in ((needed, "without its optional arguments"), (given, "with all of them")):
        for placed, how in (((by_place, either), "by position"), ((by_place,), "by name")):
            args = [None for p in names if p.kind in placed]
            kwargs = {p.name: None for p in names if p.kind not in placed}
            try:
                key.bind(*args, **kwargs)
            except TypeError:
                found.append(f"{how} {what}" if needed != given else how)
    return found


def model_of(parameter: inspect.Parameter, names: dict[str, object]) -> Any:
    """Return the pydantic model in a parameter's annotation, as Celery's `pydantic=True` does."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return None
    try:
        holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
        hint = typing.get_type_hints(holder, names)["it"]
    except Exception:  # such as a name that is imported only for type checkers
        return None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hints = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        hint = hints[0] if len(hints) == 1 else None
    return hint if is_model(hint) else None
