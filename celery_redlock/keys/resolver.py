"""Turn a task's declared key into the names of the resources that a call locks.

A key is a template, or several of them; names of arguments; a function; or None, which stands for
all arguments. Templates and functions make names in a namespace that all tasks share:
`order:<order_id>` is the same name for each of them, and so two tasks exclude each other. Names of
arguments, and None, make names that begin with the task's name, or with its `scope_name`.
"""

from __future__ import annotations

import inspect
import traceback
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..protocol.errors import ConfigurationError
from ..protocol.texts import names_of, printable
from .canonical import RAW_LITERAL, SCALARS, CannotKey, check_size, escape, text_of
from .signature import WAYS, bind_hidden, misfits, model_of, signature_of
from .template import HEADERS, Template, arguments_of, parse, shortened

Headers = Callable[[str], object]
"""Function that returns a header of a call's message by its name; None if there is none."""
EXAMPLE = "such as 'order:<order_id>'"


class Templates(tuple[str, ...]):
    """Templates, also if they look like names of arguments, as which a mere list would be taken."""


def keys_of(
    task_name: str,
    function: Callable[..., object],
    key: Any = None,
    *,
    bound: bool = False,
    more: bool = False,
    scope: str | None = None,
) -> Keys:
    """Return the object that makes the names of the resources that a call locks, each once.

    Call it with the arguments of the task, without the task itself. It raises TypeError if they do
    not fit the signature, and ConfigurationError if an argument in a key has no stable text, or if
    the user's function returns no key.

    Args:
        task_name: The task's name.
        function: The user's function; it is unwrapped as `inspect.signature` does.
        key: The key, in one of the forms above.
        bound: True if the function's first parameter is the task itself, and not part of a call.
        more: True if calls have keywords that the function does not accept.
        scope: Text in place of the task's name, and before templates; None for neither.

    Raises:
        ConfigurationError: The key is invalid.
    """
    signature, hidden = signature_of(task_name, function, bound)
    if more and all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()):
        keywords = inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD)
        signature = signature.replace(parameters=[*signature.parameters.values(), keywords])
    head = "" if scope is None else f"{scope}:"
    if callable(key):
        return _FromFunction(task_name, signature, key, head, hidden)
    parameters = signature.parameters
    several = False
    if key is None or is_own(key):
        pieces = arguments_of(parameters if key is None else _checked_names(key, parameters))
        templates = [Template(pieces, escape(task_name if scope is None else scope, "/:@ "))]
    else:
        head = escape(head, RAW_LITERAL)
        given = (key,) if isinstance(key, str) else key
        several = len(set(given)) > 1
        for name in parameters.keys() & set(given):
            raise ConfigurationError(
                f"{task_name}: the key {name!r} would be the same for all calls, and is the name of"
                f" an argument: write '<{name}>' for its value, or [{name!r}] for the task's name"
                " and it"
            )
        if several:
            _check_number(task_name, len(set(given)))
        try:
            templates = [Template(parse(template, parameters), head) for template in given]
        except ConfigurationError as error:
            raise ConfigurationError(f"{task_name}: {error}") from None
    return _FromArguments(task_name, signature, function, templates, several, hidden)


class Keys(ABC):
    """Maker of the names of the resources that a call locks; see `keys_of`.

    Attributes:
        count: Number of declared names; None if it is not known before the call.
        several: True if there is more than one, as far as is known; the same name twice is one.
        misfit: A warning about calls for which a key function fails; "" if there are none.
        headers: The names of the headers that are in keys.
        signature: The signature of the task, without the task itself.
    """

    count: int | None = None
    several = False
    misfit = ""
    signature: inspect.Signature
    headers: tuple[str, ...] = ()
    _task_name: str
    _used: tuple[str, ...] = ()
    _hidden = False

    def __call__(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        headers: Headers | None = None,
    ) -> tuple[str, ...]:
        return names_of(self.in_order(args, kwargs, headers))

    @abstractmethod
    def in_order(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        headers: Headers | None = None,
    ) -> tuple[str, ...]:
        """Return the names as they are declared; a name may occur twice."""

    def arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments of a call by their names, including defaults."""
        values = dict(self._bind(args, kwargs))
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                values |= typing.cast(dict[str, object], values.pop(name))
        return values

    def _bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:
            if not self._hidden:
                raise
            return bind_hidden(self._task_name, self.signature, self._used, args, kwargs)
        bound.apply_defaults()
        return bound.arguments


class _FromArguments(Keys):
    """Keys made of arguments by templates."""

    def __init__(
        self,
        task_name: str,
        signature: inspect.Signature,
        function: Callable[..., object],
        templates: Sequence[Template],
        several: bool,
        hidden: bool,
    ) -> None:
        self._hidden = hidden
        self.count = len(templates)
        self.several = several
        self._task_name = task_name
        self.signature = signature
        self._globals = getattr(inspect.unwrap(function), "__globals__", {})
        self._models: dict[str, Any] = {}
        self._templates = templates
        parameters = signature.parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        # Signatures without "/", "*args" and "**kwargs" are bound by hand: inspect takes longer
        # than all the rest.
        self._simple = kinds <= {by_place, inspect.Parameter.KEYWORD_ONLY}
        self._names = frozenset(parameters)
        self._places = tuple(name for name, p in parameters.items() if p.kind is by_place)
        self._defaults = {
            name: p.default for name, p in parameters.items() if p.default is not p.empty
        }
        names = dict.fromkeys(name for each in templates for name in each.names)
        self._used = tuple(name for name in names if name in parameters)
        self.headers = tuple(name[len(HEADERS) :] for name in names if name not in parameters)
        for name in self._used:
            try:
                text_of(self._defaults.get(name), 0)
            except CannotKey as error:
                raise self._refusal(f"the default of argument {name!a}", error) from None

    def in_order(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        headers: Headers | None = None,
    ) -> tuple[str, ...]:
        values = self._bind(args, kwargs)
        texts = {}
        for name in self._used:
            value = values[name]
            scalar = SCALARS.get(type(value))
            texts[name] = self._text(name, value) if scalar is None else scalar(value, 0)
        for name in self.headers:
            if headers is None or (said := headers(name)) is None:
                raise ConfigurationError(
                    f"the lock key of {self._task_name} names the header {name!a}, and this call"
                    f" has none: publish it with headers={{{name!r}: ...}}. A plain call of the"
                    " task has no headers"
                )
            texts[HEADERS + name] = self._text(HEADERS + name, said)
        if self.count == 1:
            return (self._templates[0](texts),)
        return tuple([template(texts) for template in self._templates])

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
        return super()._bind(args, kwargs)

    def _text(self, name: str, value: object) -> str:
        try:
            check_size(value)
            if isinstance(value, Mapping) and name in self._names:
                value = self._as_model(name, value)
            return text_of(value, 0)
        except CannotKey as error:
            what = "argument" if name in self._names else "header"
            raise self._refusal(f"{what} {name.removeprefix(HEADERS)!a}", error) from None

    def _refusal(self, what: str, error: CannotKey) -> ConfigurationError:
        return ConfigurationError(
            f"{what} of {self._task_name} {error}, so it cannot be part of a lock key. Give the"
            f" task a lock_key that names only other arguments, {EXAMPLE}."
        )

    def _as_model(self, name: str, value: Mapping[Any, object]) -> object:
        if name not in self._models:  # resolved late: the annotation may name a class further down
            self._models[name] = model_of(self.signature.parameters[name], self._globals)
        model = self._models[name]
        if model is None:
            return value
        try:
            return model.model_validate(value)
        except Exception:
            return value  # the task itself must accept or refuse it, not its lock


class _FromFunction(Keys):
    """Keys made of arguments by a function of the user."""

    def __init__(
        self,
        task_name: str,
        signature: inspect.Signature,
        key: Callable[..., object],
        head: str,
        hidden: bool,
    ) -> None:
        self._hidden = hidden
        self._task_name = task_name
        self.signature = signature
        self._key = key
        self._head = head
        if not is_plain(key):
            raise ConfigurationError(
                f"{self}: is async, or a generator; give one that returns a str"
            )
        try:
            taken = inspect.signature(key)
        except (TypeError, ValueError):  # some functions written in C have no signature
            return
        if next(iter(taken.parameters), "") == "self" and "self" not in signature.parameters:
            raise ConfigurationError(
                f"{self}: it is called with the arguments of the task, without the task itself;"
                " take 'self' away, and in a class write @staticmethod over it"
            )
        all_misfits = [] if hidden else misfits(signature, taken)
        if all_misfits and "self" in signature.parameters:  # "self" may turn out to be the task
            others = [p for name, p in signature.parameters.items() if name != "self"]
            all_misfits = min(
                all_misfits, misfits(signature.replace(parameters=others), taken), key=len
            )
        if all_misfits:
            wanted = ", ".join(signature.parameters)
            ways = " nor ".join(dict.fromkeys(all_misfits))
            self.misfit = (
                f"{self}: it is called with the arguments of the task, ({wanted}), as the task is,"
                f" and cannot be called so {ways}; let it take what it does not need by *_ and **_"
            )
            if len(all_misfits) == WAYS:
                raise ConfigurationError(self.misfit)

    def __str__(self) -> str:
        name = getattr(self._key, "__qualname__", None) or repr(self._key)
        return printable(f"the lock key of {self._task_name}, made by {name}")

    def in_order(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        headers: Headers | None = None,
    ) -> tuple[str, ...]:
        if not self._hidden:  # a call that the task would refuse is not the key function's fault
            self.signature.bind(*args, **kwargs)
        try:
            made = self._key(*args, **kwargs)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ConfigurationError(
                f"{self}: raised {type(error).__name__}; it is called with the arguments of the"
                f" task, and returns a str, {EXAMPLE.replace('{order_id}', '17')}, or several"
            ) from error
        texts: Any = made if isinstance(made, (list, tuple, set, frozenset)) and made else [made]
        for text in texts:
            if not isinstance(text, str) or not text.strip():
                empty = isinstance(text, (str, list, tuple, set, frozenset))
                raise ConfigurationError(
                    f"{self}: must be a str that is not empty, or a list of such, not"
                    f" {'an empty one' if empty else type(text).__name__}"
                )
        if isinstance(texts, (set, frozenset)):
            texts = sorted(texts)
        return tuple([shortened(escape(self._head + text, RAW_LITERAL)) for text in texts])


def is_plain(function: Callable[..., object]) -> bool:
    """Return True if a call runs the function's body, and returns its result."""
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    called: Any = getattr(function, "__call__", None)  # noqa: B004
    return not any(kind(function) or kind(called) for kind in kinds)


def is_failure(error: BaseException) -> bool:
    """Return True if a user's function has failed; False if it was interrupted from outside.

    A call of `sys.exit()` is a failure: it would end the main process of a worker, and then, as the
    message is delivered again, that of the next. But Celery's own requests to end
    (`WorkerShutdown`, `WorkerTerminate`) are subclasses of SystemExit, and signal handlers, such as
    that of a pool child, raise SystemExit itself: the function that they interrupt has not failed.
    """
    if type(error) is not SystemExit:
        return isinstance(error, Exception)
    for frame, _line in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if types.FrameType in map(type, value if isinstance(value, tuple) else (value,)):
                return False  # only signal handlers are passed a frame
    return True


def _check_number(task_name: str, number: int) -> None:
    from ..protocol.names import MAX_NAMES  # imported late: most tasks have one key

    if number > MAX_NAMES:
        raise ConfigurationError(
            f"{task_name} has {number} keys, and one lock holds at most {MAX_NAMES}: give what they"
            " have in common a key, and lock that"
        )


def is_own(key: Sequence[str]) -> bool:
    """Return True if a key belongs to its task alone: it has names of arguments, and no templates.

    Raises:
        ConfigurationError: It is an empty list, or mixes both.
    """
    if isinstance(key, (str, Templates)):
        return False
    if not key:
        raise ConfigurationError(
            "the lock key is an empty list: name the arguments that it is made of, or None for all"
        )
    names = [item for item in key if item.isidentifier()]
    if names and len(names) < len(key):
        template = next(item for item in key if not item.isidentifier())
        raise ConfigurationError(
            f"the lock key mixes names of arguments ({names[0]!a}) and templates ({template!a}):"
            " give names alone for one key that is made of them, or templates alone for one key"
            f" each; as a template the name is '{{{names[0]}}}'"
        )
    return bool(names)


def _checked_names(names: Sequence[str], parameters: Mapping[str, object]) -> list[str]:
    """Return names of arguments, each once, sorted: two tasks may order theirs differently."""
    for name in names:
        if name not in parameters:
            known = ", ".join(parameters) or "none, because the function takes no arguments"
            raise ConfigurationError(
                f"lock key {list(names)!a}: unknown argument {name!a}; the names are: {known}"
            )
    return sorted(set(names))
