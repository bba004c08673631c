"""Imports point down only. The table is the house rule; this file is where it is kept."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "celery_redlock"

STDLIB = set(sys.stdlib_module_names)
IMPURE = {"time", "random", "threading", "socket", "select", "asyncio", "secrets", "ssl", "signal"}
"""What brings a clock, chance, a thread or a wire."""

PURE = {
    "canonical",
    "errors",
    "lease",
    "quorum",
    "channel",
    "commands",
    "guard",
    "key",
    "keys",
    "names",
    "options",
    "settings",
    "events",
    "outage",
    "refusal",
}
SIDE_ROOMS = {
    *("cli", "compat", "demo", "doctor", "entry", "exporter", "freeing", "metrics", "server"),
    *("survey", "testing", "tracing", "visit", "web"),
}
"""They may use one another, and all others."""

# Module: what it may import of this package, and of others. The standard library is free to all,
# but for the pure ring.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "lease": {"errors"},
    "quorum": {"lease"},
    "channel": {"quorum"},
    "commands": {"errors", "quorum"},
    "guard": {"lease"},
    "names": {"commands", "errors", "lease"},
    "canonical": {"errors"},
    "key": {"canonical", "errors"},
    "keys": {"canonical", "errors", "key", "lease"},
    "options": {"errors", "address"},  # address: inside a function, see below
    "settings": {"errors", "options"},
    "events": {"errors", "lease"},
    "address": {"errors", "redis", "replies"},
    "bell": set(),
    "polling": {"green"},
    "complaints": {"quorum"},
    "green": set(),
    "haste": {"green"},
    "interrupt": {"errors", "green"},
    "board": {"green", "lease"},
    "keeper": {"board", "commands", "driver", "events", "lease", "quorum"},
    "helper": {"board", "address", "driver", "keeper"},
    "custody": {"board", "errors", "helper", "lease"},  # board, helper: inside a function
    "replies": {"errors", "redis"},
    "handshake": {"errors", "guard", "replies", "redis"},
    "node": {
        *("address", "channel", "commands", "complaints", "errors", "events", "green", "guard"),
        *("handshake", "polling", "quorum", "replies", "redis"),
    },
    "driver": {
        *("address", "bell", "commands", "errors", "guard", "lease", "node", "polling", "quorum"),
    },
    "watchdog": {"bell", "haste", "lease"},
    "native": {"driver", "events", "green", "haste", "lease", "watchdog"},
    "refusal": {"errors", "guard", "lease", "quorum"},
    "outage": {"errors"},
    "line": {"bell", "errors"},
    "wakeup": {
        *("address", "bell", "commands", "errors", "lease", "line", "polling", "replies"),
        *("redis", "tenacity"),
    },
    "hold": {"driver", "errors", "events", "lease", "names", "refusal"},
    "engine": {
        *(
            "address",
            "commands",
            "custody",
            "driver",
            "errors",
            "events",
            "green",
            "guard",
            "lease",
        ),
        *("line", "names", "native", "options", "quorum", "refusal", "wakeup", "watchdog"),
    },
    "lock": {
        *("address", "custody", "driver", "engine", "errors", "events", "hold", "lease"),
        *("names", "options", "quorum", "refusal", "settings"),
    },
}
# Besides what stands above. task and worker name each other: whoever can take a lock must have the
# handlers connected that free it.
CELERY_SIDE: dict[str, set[str]] = {
    "skipped": set(),
    "results": {"celery"},
    "monitor": {"attempts", "errors", "events", "lease", "celery"},
    "signals": {"attempts", "commands", "errors", "events", "lease", "celery"},
    "attempts": {"kombu"},
    "refresh": {"broker", "errors", "task", "celery"},
    "broker": {"attempts", "celery", "kombu"},  # inside functions: older ones do not have it
    "waiting": {"attempts", "options"},
    "admission": set(),
    "dispatcher": {
        *("admission", "bell", "driver", "errors", "lease", "line", "lock", "quorum", "refusal"),
    },
    "prefetch": {"broker", "celery"},
    "parking": {
        *("admission", "attempts", "broker", "dispatcher", "driver", "errors", "lease", "lock"),
        *("monitor", "options", "prefetch", "reservation", "settings", "task", "waiting", "celery"),
    },
    "reservation": {
        *("attempts", "commands", "driver", "errors", "lease", "lock", "names", "options"),
        *("quorum", "refusal"),
    },
    "received": {"driver", "errors", "lock", "reservation", "celery"},
    "arrival": {
        *("attempts", "delivery", "driver", "errors", "hold", "lease", "lock", "names"),
        *("options", "reservation", "results", "signals", "skipped", "celery"),
    },
    "publish": {
        *("arrival", "attempts", "broker", "errors", "lease", "lock", "options", "reservation"),
        *("results", "settings", "signals", "skipped", "task", "celery", "kombu"),
    },
    "conflict": {
        *("attempts", "broker", "complaints", "errors", "lease", "options", "quorum", "signals"),
        *("skipped", "waiting", "celery", "tenacity"),
    },
    "delivery": {
        *("attempts", "broker", "conflict", "errors", "hold", "lease", "names", "options"),
        *("results", "signals", "celery"),
    },
    "task_lock": {
        *("arrival", "attempts", "delivery", "errors", "hold", "interrupt", "keys", "lease"),
        *("lock", "options", "settings", "waiting"),
    },
    "declared": {"errors", "options", "task_lock", "celery"},
    "task": {
        *("declared", "delivery", "errors", "keys", "options", "skipped", "task_lock", "worker"),
        "celery",
    },
    "worker": {
        *("arrival", "attempts", "delivery", "errors", "lease", "lock", "publish", "reservation"),
        *("conflict", "declared", "inspection", "received", "settings", "task", "celery"),
        "billiard",
        # inside functions: no other process needs them
        *("beat", "keeper", "monitor", "parking", "refresh"),
    },
    "inspection": {
        *("address", "attempts", "board", "commands", "driver", "errors", "lease", "lock"),
        *("parking", "settings", "task", "celery"),  # all of them: inside functions
    },
    "tick": {"celery"},
    "turn": {
        *("canonical", "driver", "errors", "hold", "key", "lease", "lock", "options"),
        *("outage", "signals", "tick", "celery"),
    },
    "beat": {"driver", "errors", "lease", "lock", "settings", "turn", "celery"},
}
FOR_USERS = {*("asserts", "disabled", "memory", "pytest_plugin", "redirect", "stage", "target")}
"""Of `testing`: what is for a project's own tests, and knows locks, tasks and servers."""
CELERY = {"celery", "kombu", "billiard"}
NOT_FOR_CORE = CELERY | {"rich", "click", "pydantic"}


def modules() -> dict[str, Path]:
    """Every module, by its dotted name inside the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts)] = path
    return found


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Names of modules that a file imports: of this package without dots, of others their root.

    Args:
        path: The file.
        top_level: Only what is imported when the module is, not what a function imports or what
            is for type checkers.
    """
    tree = ast.parse(path.read_text())
    lazy = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _for_types(node)
        for inner in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if _typing_only(tree, node) or (top_level and node in lazy):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            root, _, rest = (node.module or "").partition(".")
            names.add(rest.split(".")[0] if root == "celery_redlock" and rest else root)
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} if node.module else {alias.name for alias in node.names}
    return names


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _typing_only(tree: ast.AST, wanted: ast.AST) -> bool:
    if not isinstance(wanted, (ast.Import, ast.ImportFrom)):
        return False
    return any(wanted in list(ast.walk(node)) for node in ast.walk(tree) if _for_types(node))


@pytest.mark.parametrize("module", ALLOWED)
def test_a_module_imports_only_what_the_table_allows(module: str) -> None:
    known = set(modules())
    others = {n for n in imports(PACKAGE / f"{module}.py") if n in known or n not in STDLIB}
    assert others - {"__future__"} <= ALLOWED[module]


@pytest.mark.parametrize("module", sorted(PURE))
def test_the_pure_ring_has_no_clock_chance_thread_or_wire(module: str) -> None:
    seen = imports(PACKAGE / f"{module}.py")
    assert not seen & (IMPURE | NOT_FOR_CORE | {"redis", "tenacity"})
    assert "address" not in imports(PACKAGE / f"{module}.py", top_level=True)


def test_the_tables_pure_modules_depend_on_pure_ones_only() -> None:
    assert all(ALLOWED[module] <= PURE | {"address"} for module in PURE)


@pytest.mark.parametrize(
    "module", [name for name in modules() if name.split(".")[0] not in SIDE_ROOMS]
)
def test_nobody_enters_a_side_room(module: str) -> None:
    assert not imports(modules()[module]) & SIDE_ROOMS


@pytest.mark.parametrize("module", CELERY_SIDE)
def test_celerys_side_imports_only_what_the_table_allows(module: str) -> None:
    known = set(modules())
    others = {n for n in imports(PACKAGE / f"{module}.py") if n in known or n not in STDLIB}
    assert others - {"__future__"} <= CELERY_SIDE[module]


def test_the_world_is_pure() -> None:
    files = {path.stem: path for path in (PACKAGE / "testing").glob("*.py")}
    assert set(files) > FOR_USERS
    for path in [path for name, path in files.items() if name not in FOR_USERS]:
        seen = imports(path, top_level=True)
        assert not seen & (IMPURE | NOT_FOR_CORE | {"redis", "node", "driver", "lock", "server"})


@pytest.mark.parametrize("module", sorted(set(modules()) & set(ALLOWED)))
def test_the_core_knows_nothing_of_celery(module: str) -> None:
    assert not imports(PACKAGE / f"{module}.py") & NOT_FOR_CORE


def test_the_table_has_no_circle() -> None:
    def below(module: str, path: tuple[str, ...] = ()) -> None:
        assert module not in path, " -> ".join((*path, module))
        for other in ALLOWED.get(module, ()):
            below(other, (*path, module))

    for module in ALLOWED:
        below(module)


def test_every_module_has_its_place() -> None:
    # New ones are added above on purpose, with what they may import.
    known = {*ALLOWED, *CELERY_SIDE, *SIDE_ROOMS, "__init__"}
    assert {name.split(".")[0] for name in modules()} <= known


def test_no_module_is_called_celery() -> None:
    # `celery -A celery_redlock` would load it for the app.
    assert "celery" not in modules()


def test_the_checker_sees_what_is_imported(tmp_path: Path) -> None:
    source = tmp_path / "m.py"
    source.write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "import redis.connection\n"
        "from .lease import Claim\n"
        "from . import quorum\n"
        "from celery_redlock.lock import Redlock\n"
        "if TYPE_CHECKING:\n    from .node import Node\n"
        "def f():\n    import time\n"
    )
    assert imports(source) == {
        *("__future__", "typing", "redis", "lease", "quorum", "lock", "time")
    }
    assert "time" not in imports(source, top_level=True)
