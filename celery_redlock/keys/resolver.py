"""From what a task declares as its key to the names of the resources that a call locks.

A key is a template, or several of them; the names of arguments; a function; or nothing, which is
all arguments. Templates and functions make names in a space of their own, which tasks share: there
`order:{order_id}` is the same for all of them. Names of arguments, and nothing, go with the task's
name, or with what stands in its place (`scope_name`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..protocol.errors import ConfigurationError
from ..protocol.values import names_of, printable
from .canonical import RAW_LITERAL, escape
from .template import KeyMaker, bound_signature, shortened

__all__ = ["Keys", "Templates"]

EXAMPLE = "such as 'order:{order_id}'"


class Templates(tuple[str, ...]):
    """Templates, whatever they look like; in a mere list may be names of arguments."""


class _Maker(Protocol):
    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Any: ...


class Keys:
    """Makes the names of the resources that a call locks. Checked at construction, safe in threads.

    Args:
        task_name: The task's name.
        function: The user's function.
        key: What is exclusive; see above.
        bound: The function's first parameter is the task itself: not part of any call or key.
        scope: What stands in place of the task's name, and before templates; None for nothing.

    Attributes:
        several: Whether a call locks several resources; of a function that is not known before.

    Raises:
        ConfigurationError: The key cannot work.
    """

    def __init__(
        self,
        task_name: str,
        function: Callable[..., object],
        key: Any = None,
        *,
        bound: bool = False,
        scope: str | None = None,
    ) -> None:
        self.several = False
        self._makers: tuple[_Maker, ...]
        if isinstance(key, str):
            key = Templates((key,))
        if key is None or _are_names(key):
            self._makers = (KeyMaker(task_name, function, bound=bound, names=key, scope=scope),)
        elif callable(key):
            self._makers = (_FromFunction(task_name, function, key, bound, scope),)
        else:
            self.several = len(set(key)) > 1
            self._makers = tuple(
                KeyMaker(task_name, function, template, bound=bound, scope=scope)
                for template in key
            )

    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[str, ...]:
        """The names of the resources of a call, each once.

        Args:
            args: Positional arguments, without the task itself.
            kwargs: Keyword arguments.

        Raises:
            TypeError: The arguments do not fit the signature.
            ConfigurationError: An argument that is part of a key has no stable text, or the user's
                function gives no key.
        """
        if len(self._makers) == 1:
            return names_of(self._makers[0](args, kwargs))
        return names_of([make(args, kwargs) for make in self._makers])


class _FromFunction:
    """A key that a function of the user's makes of the arguments."""

    def __init__(
        self,
        task_name: str,
        function: Callable[..., object],
        key: Callable[..., object],
        bound: bool,
        scope: str | None,
    ) -> None:
        self._task_name = task_name
        self._key = key
        self._before = "" if scope is None else f"{scope}:"
        self._signature = bound_signature(task_name, function, bound)
        if inspect.iscoroutinefunction(key) or inspect.isasyncgenfunction(key):
            raise ConfigurationError(f"{self}: is async; give one that returns a str")
        try:
            first = next(iter(inspect.signature(key).parameters), "")
        except (TypeError, ValueError):  # some that are written in C tell nothing of themselves
            first = ""
        if first == "self" and "self" not in self._signature.parameters:
            raise ConfigurationError(
                f"{self}: it is called with the arguments of the task, without the task itself;"
                " take 'self' away, and in a class write @staticmethod over it"
            )

    def __str__(self) -> str:
        name = getattr(self._key, "__qualname__", None) or repr(self._key)
        return printable(f"the lock key of {self._task_name}, made by {name}")

    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str | list[str]:
        self._signature.bind(*args, **kwargs)  # what the task would not take is not the key's fault
        try:
            made = self._key(*args, **kwargs)
        except Exception as error:
            raise ConfigurationError(
                f"{self}: raised {type(error).__name__}; it is called with the arguments of the"
                f" task, and returns a str, {EXAMPLE.replace('{order_id}', '17')}, or several"
            ) from error
        if isinstance(made, str):
            return self._name(made)
        if isinstance(made, (list, tuple, set, frozenset)) and made:
            return [self._name(name) for name in made]
        raise self._refusal(made)

    def _name(self, text: object) -> str:
        if not isinstance(text, str) or not text.strip():
            raise self._refusal(text)
        return shortened(escape(self._before + text, RAW_LITERAL))

    def _refusal(self, made: object) -> ConfigurationError:
        what = "an empty one" if isinstance(made, (str, list, tuple, set, frozenset)) else ""
        return ConfigurationError(
            f"{self}: must be a str that is not empty, or a list of such, not"
            f" {what or type(made).__name__}"
        )


def _are_names(key: Any) -> bool:
    """Whether a list holds the names of arguments, and no templates.

    Raises:
        ConfigurationError: It is empty, or holds some of each.
    """
    if isinstance(key, Templates) or not isinstance(key, (list, tuple)):
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
