"""From a task's name, signature and arguments to the name of the resource it locks.

Values are written in one canonical form (`canonical.py`), each so that its end can be read off:
no value of one argument can forge another key. Keys are printable ASCII.

A template's text is a namespace of its own, without the task's name: two tasks with the template
`order:{order_id}` share their locks, which is how two tasks exclude each other.
"""

from __future__ import annotations

import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b

from ..protocol.errors import ConfigurationError
from .canonical import RAW_LITERAL, SCALARS, TOKEN, CannotKey, canonical, escape, is_model, text_of

__all__ = ["KeyMaker", "bound_signature", "canonical", "check_template", "shortened"]

MAX_BYTES = 200
"""Keys over this many bytes become a readable head, `#`, and a digest of the whole."""
_DIGEST_BYTES = 16
_HEAD = MAX_BYTES - 1 - 2 * _DIGEST_BYTES
_PIECES = re.compile(r"(\{\{|\}\}|<<|>>)|\{([^{}<>]*)\}|<([^{}<>]*)>|([{}<>])|([^{}<>]+)")


def check_template(template: str, names: Collection[str]) -> list[tuple[str, str | None]]:
    """Split a template into pairs of literal text and the name that follows it (None at the end).

    `{name}` and `<name>` insert an argument; `{{`, `}}`, `<<`, `>>` are the characters themselves.

    Args:
        template: The template as the user wrote it.
        names: The names it may use.

    Raises:
        ConfigurationError: It is empty, has a broken bracket, or holds anything but known names.
    """

    def refuse(why: str) -> ConfigurationError:
        return ConfigurationError(f"lock key template {template!a}: {why}")

    if not isinstance(template, str):
        raise refuse(f"must be a str, not {type(template).__name__}")
    if not template.strip():
        raise refuse("is empty; name what is locked, such as 'order:{order_id}'")
    known = ", ".join(names) or "none, since the function takes no arguments"
    plan: list[tuple[str, str | None]] = []
    literal = ""
    for found in _PIECES.finditer(template):
        doubled, braced, angled, broken, text = found.groups()
        if doubled or text:
            literal += doubled[0] if doubled else text
            continue
        if broken:
            raise refuse(f"unbalanced {broken!r} at {found.start()}; write it twice to mean itself")
        name = angled if braced is None else braced
        if not name:
            raise refuse(f"{found[0]!r} inserts nothing; give the name of an argument: {known}")
        if name not in names:
            if not name.isidentifier():
                raise refuse(
                    f"{found[0]!a} must hold only the name of an argument, without attribute,"
                    f" index, conversion or format; the names are: {known}"
                )
            raise refuse(f"unknown name {name!a}; the names are: {known}")
        plan.append((literal, name))
        literal = ""
    plan.append((literal, None))
    return plan


def shortened(key: str) -> str:
    """A key of printable ASCII, cut to a readable head and a digest of the whole if it is long."""
    if len(key) <= MAX_BYTES:
        return key
    digest = blake2b(key.encode("ascii"), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{key[:_HEAD]}#{digest}"


def _stop(after: str, following: str | None) -> str | None:
    """What, found in a value before the literal `after`, puts the value into parentheses.

    Without it one could not tell where the value ends. None where any value's end is plain; "",
    which is in every value, where another value follows at once.
    """
    if not after:
        return None if following is None else ""
    if after[0] == "(":  # would read as going on after a type's name
        return ""
    return after[0] if after[0] in TOKEN else None


class KeyMaker:
    """Makes the resource name for a call. Checked at construction, immutable, safe in threads.

    Args:
        task_name: The task's name; it starts a key without a template.
        function: The user's function; wrapped ones are seen through as `inspect.signature` does.
        template: Such as `order:{order_id}`; None for the task's name and all its arguments.
            `*args` and `**kwargs` are named like the others, a list and a dict.
        bound: The function's first parameter is the task itself: not part of any call or key.
        names: Without a template: the arguments that are part of the key, in whatever order; all if
            None.
        scope: What the key begins with: in place of the task's name, or before the template.

    Raises:
        ConfigurationError: The template cannot work, an argument is unknown, or a default cannot be
            part of a key.
    """

    def __init__(
        self,
        task_name: str,
        function: Callable[..., object],
        template: str | None = None,
        *,
        bound: bool = False,
        names: Sequence[str] | None = None,
        scope: str | None = None,
    ) -> None:
        self._task_name = task_name
        self._signature = signature = bound_signature(task_name, function, bound)
        self._globals = getattr(inspect.unwrap(function), "__globals__", {})
        self._models: dict[str, typing.Any] = {}
        parameters = signature.parameters
        pairs: list[tuple[str, str | None]]
        if template is None:
            named = parameters if names is None else _known(names, parameters)
            pairs = [*((f",{escape(name)}=", name) for name in named), (")", None)]
            head = escape(task_name if scope is None else scope, "/:@ ")
            pairs[0] = (head + "(" + pairs[0][0].lstrip(","), pairs[0][1])
        else:
            pairs = [
                (escape(literal, RAW_LITERAL), name)
                for literal, name in check_template(template, parameters)
            ]
            if scope is not None:
                pairs[0] = (escape(f"{scope}:", RAW_LITERAL) + pairs[0][0], pairs[0][1])
        self._tail = pairs[-1][0]
        self._plan = tuple(
            (literal, name, _stop(after, following))
            for (literal, name), (after, following) in itertools.pairwise(pairs)
            if name is not None
        )
        kinds = {parameter.kind for parameter in parameters.values()}
        by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        # Only signatures without "/", "*args" and "**kwargs" are bound by hand.
        self._simple = kinds <= {by_place, inspect.Parameter.KEYWORD_ONLY}
        self._names = frozenset(parameters)
        self._places = tuple(name for name, p in parameters.items() if p.kind is by_place)
        self._defaults = {
            name: p.default for name, p in parameters.items() if p.default is not p.empty
        }
        for _, name, _ in self._plan:
            try:
                text_of(self._defaults.get(name), 0)
            except CannotKey as error:
                raise self._refusal(f"the default of argument {name!a}", error) from None

    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the resource name for a call.

        Args:
            args: Positional arguments, without the task itself.
            kwargs: Keyword arguments.

        Raises:
            TypeError: The arguments do not fit the signature.
            ConfigurationError: An argument that is part of the key has no stable text.
        """
        values = self._bind(args, kwargs)
        key = ""
        for literal, name, stop in self._plan:
            value = values[name]
            scalar = SCALARS.get(type(value))
            text = self._argument(name, value) if scalar is None else scalar(value, 0)
            if stop is not None and stop in text:
                text = f"({text})"
            key += literal + text
        return shortened(key + self._tail)

    def _bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        if self._simple and len(args) <= len(self._places):
            values = dict(zip(self._places, args, strict=False))
            if not kwargs or values.keys().isdisjoint(kwargs):
                values.update(kwargs)
                if values.keys() == self._names:
                    return values
                values = {**self._defaults, **values}
                if values.keys() == self._names:
                    return values
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _argument(self, name: str, value: object) -> str:
        if isinstance(value, Mapping):
            value = self._as_model(name, value)
        try:
            return text_of(value, 0)
        except CannotKey as error:
            raise self._refusal(f"argument {name!a}", error) from None

    def _refusal(self, what: str, error: CannotKey) -> ConfigurationError:
        return ConfigurationError(
            f"{what} of {self._task_name} {error}, so it cannot be part of a lock key. Give the"
            " task a lock_key that names only other arguments, such as 'order:{order_id}'."
        )

    def _as_model(self, name: str, value: Mapping[typing.Any, object]) -> object:
        if name not in self._models:  # resolved late: the annotation may name a class further down
            self._models[name] = _model_of(self._signature.parameters[name], self._globals)
        model = self._models[name]
        if model is None:
            return value
        try:
            return model.model_validate(value)
        except Exception:
            return value  # whether the task accepts it is for the task to say, not for its lock


def _model_of(parameter: inspect.Parameter, names: dict[str, object]) -> typing.Any:
    """The pydantic model a parameter is annotated with, as Celery's `pydantic=True` sees it."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return None
    try:
        holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
        hint = typing.get_type_hints(holder, names)["it"]
    except Exception:  # such as a name imported only for type checkers
        return None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hints = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        hint = hints[0] if len(hints) == 1 else None
    return hint if is_model(hint) else None


def _known(names: Sequence[str], parameters: Mapping[str, object]) -> list[str]:
    """Names of arguments, each once; sorted, for two tasks may order theirs differently."""
    for name in names:
        if name not in parameters:
            known = ", ".join(parameters) or "none, since the function takes no arguments"
            raise ConfigurationError(
                f"lock key {list(names)!a}: unknown argument {name!a}; the names are: {known}"
            )
    return sorted(set(names))


def bound_signature(
    task_name: str, function: Callable[..., object], bound: bool
) -> inspect.Signature:
    """The signature of a task's function, without the task itself.

    Raises:
        ConfigurationError: It is bound, and takes no task.
    """
    signature = inspect.signature(function)
    if not bound:
        return signature
    first, *others = signature.parameters.values() or (None,)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise ConfigurationError(
            f"{task_name} is bound (bind=True), so its function needs a first parameter: self"
        )
    if first.kind is first.VAR_POSITIONAL:  # "*args" takes the task in, and stays
        return signature
    return signature.replace(parameters=others)
