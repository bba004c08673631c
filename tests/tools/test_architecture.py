"""Imports only from the rooms below: `rooms.py` lists them, docs/architecture.md shows them."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import is_typeddict

import pytest

import celery_redlock
from tests.support import lanes
from tests.tools.rooms import ROOMS

PACKAGE = Path(__file__).parents[2] / "celery_redlock"
ROOT = "celery_redlock"

STDLIB = set(sys.stdlib_module_names)
IMPURE = {"time", "random", "threading", "socket", "select", "asyncio", "secrets", "ssl", "signal"}
"""Modules that bring a clock, chance, a thread or a socket."""
PURE = ("protocol", "keys", "config", "events")
CELERYS = {"_pending", "_request"}
"""Private names of Celery's that are reached for, and that one of ours happens to have as well."""
HANDS_ON = {"survey", "doctor", "web", "cli", "testing", "compat"}
"""Their `__init__` files have names that users import; of all others it is a docstring."""


@dataclass(frozen=True)
class Import:
    """An import statement of a file.

    Attributes:
        of: The module, with dots; of this package from its root on.
        name: What of it; empty for the module itself.
        lazy: Whether it stands in a function.
    """

    of: str
    name: str
    lazy: bool


def modules() -> dict[str, Path]:
    """Every module, by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, name: str) -> list[Import]:
    """Return what a file imports when it runs, without the imports for type checkers.

    Args:
        path: The file.
        name: Its dotted name, from which relative imports count.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def of(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, "", lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package.rsplit(".", child.level - 1)[0] if child.level else ""
                module = ".".join(part for part in (base, child.module) if part)
                for alias in child.names:
                    inner = f"{module}.{alias.name}"
                    yield Import(*((inner, "") if inner in MODULES else (module, alias.name)), lazy)
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from of(child, lazy or function)

    return list(of(ast.parse(path.read_text()), False))


@functools.cache
def imports_of(name: str) -> list[Import]:
    """Return the imports of a module of the package."""
    return imports(MODULES[name], name)


def room_of(module: str) -> str:
    """The room that a module of the package stands in; empty for its root."""
    return [*module.split("."), ""][1]


def ours(name: str) -> list[str]:
    """The modules of this package that one imports."""
    return [one.of for one in imports_of(name) if one.of.split(".")[0] == ROOT]


INNER = [name for name in MODULES if room_of(name)]


def modules_of(room: str) -> list[str]:
    """The modules of a room."""
    return [name for name in INNER if room_of(name) == room]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_the_rooms_below(room: str) -> None:
    allowed = {room, *ROOMS[room][0]}
    upwards = {
        (module, name)
        for module in modules_of(room)
        for name in ours(module)
        if room_of(name) and room_of(name) not in allowed
    }
    assert not upwards, f"{room} may import from {', '.join(sorted(allowed))}"


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_exactly_the_libraries_of_its_row(room: str) -> None:
    found = {
        (one.of.split(".")[0], module) for module in modules_of(room) for one in imports_of(module)
    }
    others = {name for name, _module in found} - {ROOT}
    row = ROOMS[room][1]
    more = {(name, module) for name, module in found if name in others - STDLIB - row}
    assert not more, f"not in the row of {room}"
    assert row <= others, "what nobody imports any more is struck from the table"
    if room in PURE:
        impure = {(name, module) for name, module in found if name in IMPURE}
        assert not impure, f"{room} has no clock, chance, thread or wire"


def test_nothing_private_of_redis_py_is_imported() -> None:
    names = {f"{one.of}.{one.name}" for name in MODULES for one in imports_of(name)}
    assert not [name for name in names if name.startswith("redis.") and "._" in name]


def circle(graph: dict[str, list[str]]) -> list[str]:
    """Some modules that import one another in a circle; empty if there are none."""
    done: set[str] = set()

    def below(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in graph.get(name, ()):
            if found := below(other, (*path, name)):
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := below(name, ()))), [])


def test_imports_between_rooms_have_no_cycle() -> None:
    graph = {name: list(below) for name, (below, _others) in ROOMS.items()}
    assert {other for below in graph.values() for other in below} <= set(ROOMS)
    assert not circle(graph), " -> ".join(circle(graph))


def test_imports_between_files_have_no_cycle() -> None:
    graph = {name: [other for other in ours(name) if other != name] for name in MODULES}
    # The root and a room pass names on; an import from them means the name.
    graph = {name: found for name, found in graph.items() if MODULES[name].name != "__init__.py"}
    assert not circle(graph), " -> ".join(circle(graph))


def private(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """The private names of a file: those that it defines (True), and reaches for in others."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, True
        elif isinstance(node, ast.arg):
            yield node.arg, True
        elif isinstance(node, ast.Attribute):
            mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield node.attr, mine or isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith(ROOT)):
            yield from ((alias.name, False) for alias in node.names)


def test_no_room_uses_private_names_of_another_room() -> None:
    defined: dict[str, set[str]] = {}
    reached: list[tuple[str, str]] = []
    for name, path in MODULES.items():
        for word, own in private(ast.parse(path.read_text())):
            if word.startswith("_") and not word.startswith("__") and word not in CELERYS:
                if own:
                    defined.setdefault(word, set()).add(room_of(name))
                else:
                    reached.append((name, word))
    wrong = {
        f"{name}: {word}, of {', '.join(sorted(defined[word]))}"
        for name, word in reached
        if word in defined and room_of(name) not in defined[word]
    }
    assert not wrong, sorted(wrong)


@pytest.mark.parametrize("name", [name for name in MODULES if name.count(".") == 1])
def test_every_room_has_a_row_in_the_table(name: str) -> None:
    assert room_of(name) in ROOMS, "new ones are added above on purpose, with what they may import"
    path = MODULES[name]
    if path.name == "__init__.py" and room_of(name) not in HANDS_ON:
        assert len(ast.parse(path.read_text()).body) <= 1, "a docstring, and nothing else"


def test_no_module_is_called_celery() -> None:
    # `celery -A celery_redlock` would load it for the app.
    assert not [name for name in MODULES if name.rpartition(".")[2] == "celery"]


def test_public_classes_name_the_package_root_as_their_module() -> None:
    """Celery stores the module of an exception in a result: moving a class must not change it."""
    public = {name: getattr(celery_redlock, name) for name in celery_redlock.__all__}
    classes = {name: one for name, one in public.items() if isinstance(one, type)}
    classes = {name: one for name, one in classes.items() if not is_typeddict(one)}
    assert len(classes) == 15
    assert {one.__module__ for one in classes.values()} == {ROOT}


def test_files_have_at_most_400_lines_and_functions_few_positional_parameters() -> None:
    for name, path in MODULES.items():
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= 400, name
        if name == f"{ROOT}.events":
            continue  # hooks take what they do
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                taken = [*node.args.posonlyargs, *node.args.args]
                taken = [one for one in taken if one.arg not in ("self", "cls")]
                assert len(taken) <= 6, f"{name}: {node.name} takes {len(taken)} positional ones"


def test_no_test_module_imports_from_another() -> None:
    """Code that several test modules use is in tests/support, or is a fixture of a conftest.py."""
    from_another = re.compile(
        r"^\s*from (tests\.)?\S*\btest_\w+ import|^\s*import \S*\.test_", re.M
    )
    assert from_another.search("\n    from tests.protocol.test_quorum import a")
    for path in (PACKAGE.parent / "tests").rglob("*.py"):
        found = from_another.search(path.read_text("utf-8"))
        assert not found, f"{path.name}: {found}"


@pytest.mark.parametrize(
    "name",
    [
        *(*lanes.COMPUTING, *lanes.RABBITMQ, *lanes.BROWSER),
        *(*lanes.LONGEST, *lanes.FILLING, *lanes.SPLIT),
    ],
)
def test_path_named_in_a_table_of_lanes_exists(name: str) -> None:
    root = PACKAGE.parent
    assert (root / name).is_dir() or list(root.glob(f"{name}*"))
