"""Names, options, links, log lines and constants on the pages of docs: each exists."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import celery.exceptions
import click
import pytest

import celery_redlock
from celery_redlock import cli
from celery_redlock.beat import scheduler, ticks
from celery_redlock.compat import once, singleton
from celery_redlock.config import settings
from celery_redlock.events import Listener
from celery_redlock.keepalive import watchdog
from celery_redlock.messages import policy, signals
from celery_redlock.protocol import lease, pipeline, values
from celery_redlock.stores import contract
from celery_redlock.stores import node as a_node
from celery_redlock.testing import pytest_plugin
from celery_redlock.worker.parking import dispatcher, memory, prefetch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_redlock"
SCHEMA = (PACKAGE / "stores/postgresql/schema.sql").read_text("utf-8")
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in DOCS)]
LINKED = [*PAGES, "CHANGELOG.md"]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.M | re.S)


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)


def spans(page: str) -> list[str]:
    """Return all texts between single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def section(page: str, heading: str) -> str:
    found = re.search(
        rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", prose(page), re.M | re.S
    )
    assert found, f"{page} has no heading {heading!r}"
    return found[2]


def first_cells(table: str) -> str:
    return "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| "))


WITH_CODE = [page for page in PAGES if blocks(page)]
assert len(WITH_CODE) > 6


RUN = """
import json, os, sys, traceback
import celery, celery_redlock.testing
from celery_redlock import Redlock, SingletonTask, locked
for page, path, blocks in json.load(sys.stdin):
    if os.fork() == 0:
        try:
            sys.path.insert(0, path)
            names = {}
            for code in blocks:
                if page != "README.md" and "/recipes/" not in page:
                    names = {}  # there each goes on with the last
                exec(compile(code, page, "exec"), names)
        except BaseException:
            print(f"{page}: {traceback.format_exc()}", flush=True)
        os._exit(0)
    os.wait()
"""
"""Each page in a process of its own: examples make apps and subscribe listeners."""


def test_code_in_docs_runs_as_far_as_it_goes_without_servers(tmp_path: Path) -> None:
    pages = []
    for number, page in enumerate(WITH_CODE):
        path = tmp_path / str(number)
        path.mkdir()
        # A block that begins with the name of a file is that file to the others of its page.
        for block in blocks(page):
            name = re.match(r"# (\w+\.py)\n", block)
            if name:
                (path / name[1]).write_text(block, encoding="utf-8")
        pages.append((page, str(path), blocks(page)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        cwd=ROOT,
        input=json.dumps(pages),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "py")])
def test_code_that_needs_other_code_around_it_is_run_by_a_test_of_its_page(page: str) -> None:
    """Blocks marked `py` and not `python` are left out above."""
    stem = Path(page).stem
    tests = [path.read_text("utf-8") for path in (ROOT / "tests/tools/examples").glob("test_*.py")]
    assert any(re.search(rf"\"{stem}(\.md)?\"", text) for text in tests), page


RECIPES = sorted((ROOT / "docs/recipes").glob("*.md"))


@pytest.mark.parametrize("stem", [page.stem for page in RECIPES if page.stem != "index"])
def test_every_recipe_is_run_by_a_test(stem: str) -> None:
    files = (ROOT / "tests/tools/examples").glob("test_recipes*.py")
    tests = "\n".join(path.read_text("utf-8") for path in files)
    assert re.search(rf'\b(?:running|code|blocks)\("{stem}"', tests), stem


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_in_docs_imports_only_public_names(page: str) -> None:
    seen = 0
    for tree in map(ast.parse, blocks(page)):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("celery_redlock"):
                public = importlib.import_module(node.module).__all__
                for alias in node.names:
                    assert alias.name in public, f"{node.module} has no {alias.name}"
                    seen += 1
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                kinds = {
                    "redlock": [celery_redlock.Redlock],
                    "lease": [celery_redlock.HeldLease, celery_redlock.Lease],
                }.get(node.value.id, [])
                assert not kinds or any(
                    hasattr(kind, node.attr) or node.attr in fields(kind) for kind in kinds
                ), f"{node.value.id}.{node.attr}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "locked":
                assert {word.arg for word in node.keywords} <= set(settings.TASK)
    assert seen


def fields(kind: type[Any]) -> set[str]:
    """Attributes that instances get: those the docstring names."""
    return set(re.findall(r"^ {8}(\w+):", kind.__doc__ or "", re.M))


@pytest.mark.parametrize("page", LINKED)
def test_links_in_docs_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in map(slug, headings), f"{page} links to {target}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("index", [page for page in PAGES if page.endswith("/index.md")])
def test_every_page_is_once_in_the_menu_and_once_on_the_map_of_its_index(index: str) -> None:
    menus = re.findall(r"^```\{toctree\}\n(.*?)^```$", read(index), re.M | re.S)
    names = [line for menu in menus for line in menu.splitlines() if line and line[0] != ":"]
    here = (ROOT / index).parent
    pages = {path.stem for path in here.glob("*.md")} - {"index"}
    pages |= {f"{path.parent.name}/index" for path in here.glob("*/index.md")}
    assert sorted(names) == sorted(pages)
    on_the_map = re.findall(r"^- \[[^\]]+\]\(([\w/-]+)\.md\)", read(index), re.M)
    assert on_the_map == names


@pytest.mark.parametrize("page", LINKED)
def test_options_named_in_docs_exist(page: str) -> None:
    text = read(page)
    for name in re.findall(r"(?<!\w)redlock_(\w+)", text) + re.findall(
        r"CELERY_REDLOCK_(\w+)", text
    ):
        known = name.lower() in settings.GLOBAL or hasattr(pytest_plugin, f"redlock_{name}")
        known = known or f"redlock_{name}" in celery_redlock.__all__
        known = known or bool(re.search(rf"^CREATE .* redlock_{name} ?\(", SCHEMA, re.M))
        assert known, f"{page}: redlock_{name}"
    for name in re.findall(r"(?<!\w)lock_(\w+)", text):
        # celery-singleton's
        known = name in settings.TASK or name == "expiry" or f"lock_{name}" in signals.__all__
        assert known, f"{page}: lock_{name}"


@pytest.mark.defaults
def test_settings_page_is_the_one_generated_from_the_code() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs/make_settings.py")
    assert spec and spec.loader
    make: Any = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(make)
    sys.path[:] = path
    page = read("docs/settings.md")
    assert make.entries() in page and make.render(page) == page, "run: python docs/make_settings.py"
    of_app, _, of_task = make.entries().partition("## Options of a task\n")
    for text, prefix, table in (
        (of_app, "redlock_", settings.GLOBAL),
        (of_task, "lock_", settings.TASK),
    ):
        entries = dict(re.findall(rf"^### `{prefix}(\w+)`\n(.*?)(?=^##|\Z)", text, re.M | re.S))
        assert list(entries) == list(table)
        for name, entry in entries.items():
            kinds = re.findall(r"^- (Type|Default|Set it as): ", entry, re.M)
            assert kinds == ["Type", "Default", "Set it as"], name
            is_same = f"[`redlock_{name}`](#redlock_{name})" in entry
            assert "**When to change it.** " in entry or is_same, name


MODULES: dict[str, list[str]] = {}
"""By its last name, where each module is."""
for path in PACKAGE.rglob("*.py"):
    if path.parent.name == "demo":
        continue  # its app wants to be run by it
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    MODULES.setdefault(path.stem, []).append(".".join(parts))


def named(module: Any, dotted: str) -> bool:
    """Return True if a module has the dotted name, attribute by attribute."""
    thing = module
    for name in dotted.split("."):
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


@pytest.mark.parametrize("page", PAGES)
def test_modules_and_attributes_named_in_docs_exist(page: str) -> None:
    for span in spans(page):
        dotted = re.fullmatch(r"(?:celery_redlock\.)?([a-z]\w+)((?:\.\w+)+)", span)
        if re.fullmatch(r"[a-z]\w+\.py", span):
            known = span[:-3] in MODULES or (ROOT / "examples" / span).exists()
            assert known, f"{page}: {span}"
        elif span.endswith(".sql"):
            assert list(PACKAGE.rglob(span)), f"{page}: {span}"
        elif dotted and (places := MODULES.get(dotted[1])):
            found = [named(importlib.import_module(place), dotted[2][1:]) for place in places]
            assert any(found), f"{page}: {span}"


OTHERS = re.findall(
    r"\w+",
    """
    YES NO SILENT RETRY SUCCESS INFO NULL SELECT UPDATE SET REVOKE PGPASSFILE PUT ETag AsyncResult
    NOSCRIPT EVAL EVALSHA DEL FLUSHALL FLUSHDB KEYS SCAN TIME AUTH NOPERM PERSIST KEY CONFIG
    OOM MISCONF NOREPLICAS READONLY BUSY LOADING CLUSTERDOWN MASTERDOWN MOVED
    File Lock ONCE RateLimit REJECTED SETNX SIGKILL ModifyIndex CLOCK_BOOTTIME
    REDLOCK_NODES REDLOCK_TTL REDLOCK_WEB_TOKEN CELERY_BROKER_URL PROMETHEUS_MULTIPROC_DIR
    CELERY_ CELERY_TASK_ALWAYS_EAGER CACHES INSTALLED_APPS TestCase F
    TimeoutStopSec KillMode RestartSec POST DELETE LISTEN DATABASE_URL CONN_MAX_AGE CC BCC
    """,
)
"""Words of votes, Celery, Redis, SQL, HTTP, systemd, Django, other libraries, the environment."""


@pytest.mark.parametrize("page", PAGES)
def test_classes_named_in_docs_exist(page: str) -> None:
    places: list[ModuleType] = [celery_redlock, lease, values, celery.exceptions, builtins]
    places += [once, singleton, contract, a_node]
    for span in spans(page):
        name = re.fullmatch(r"([A-Z]\w+)(\(.*\))?", span)
        if name and name[1] not in OTHERS and not name[1].startswith("CELERY_REDLOCK_"):
            assert any(hasattr(place, name[1]) for place in places), f"{page}: {span}"


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_named_in_docs_exist(page: str) -> None:
    targets = re.findall(r"^([a-z]+):", read("Makefile"), re.M)
    for target in re.findall(r"(?:`|^)make (\w+)", read(page), re.M):
        assert target in targets, f"{page}: make {target}"


def test_each_promise_names_tests_that_exist() -> None:
    promises = re.findall(
        r"^\| (G\d+) \|", section("docs/guarantees.md", "What is guaranteed"), re.M
    )
    table = section("CONTRIBUTING.md", "Where a promise is tested")
    assert promises == re.findall(r"^\| (G\d+) ", table, re.M)
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", table):
        assert f"def {test}(" in read(file), f"{file}::{test}"


def methods(kind: type[Any]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_listener_hooks_are_all_documented() -> None:
    table = first_cells(section("docs/python.md", "Listeners"))
    documented = dict(re.findall(r"`(\w+)\(([\w, ]+)\)`", table))
    assert documented.keys() == methods(Listener)
    for name, arguments in documented.items():
        code = getattr(Listener, name).__code__
        names = code.co_varnames[1 : code.co_argcount]
        assert arguments.split(", ") == list(names)


@pytest.mark.parametrize(
    ("kind", "heading", "besides", "unlisted"),
    [
        # As it was given them.
        ("Redlock", "`Redlock`, without Celery", "Redlock", "ttl prefix node_timeout"),
        ("HeldLease", "`current_lease()`", "resource", "acquire end loss lost_unnoticed unused"),
    ],
)
def test_methods_of_redlock_and_leases_are_all_documented(
    kind: str, heading: str, besides: str, unlisted: str
) -> None:
    table = first_cells(section("docs/python.md", heading))
    named = set(re.findall(r"`(?:Redlock\.)?(\w+)[(`]", table))
    assert named - {besides} == methods(getattr(celery_redlock, kind)) - set(unlisted.split())


@functools.cache
def nodes() -> list[ast.AST]:
    """Return the nodes of the package's syntax trees."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    return [node for tree in trees for node in ast.walk(tree)]


def given_to(method: str) -> set[Any]:
    """Return the constants that are given as first argument to methods of this name."""
    calls = [node for node in nodes() if isinstance(node, ast.Call)]
    first = [one.args[0] for one in calls if getattr(one.func, "attr", "") == method and one.args]
    return {node.value for node in first if isinstance(node, ast.Constant)}


def test_log_names_in_docs_are_those_of_the_code() -> None:
    documented = set(
        re.findall(r"`(celery_redlock[\w.]*)`", section("docs/errors.md", "Log names"))
    )
    used = {name for name in given_to("getLogger") if name.startswith("celery_redlock")}
    assert documented == used - {"celery_redlock.testing"}


@pytest.mark.parametrize(
    ("page", "heading"), [("docs/runbook.md", "Log lines"), ("docs/beat.md", "In the log")]
)
def test_log_lines_in_the_runbook_are_those_of_the_code(page: str, heading: str) -> None:
    said = [
        re.sub(r"%\.?\d*[srdf]", "…", node.value)
        for node in nodes()
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    lines = re.findall(r"`([^`]+)`", first_cells(section(page, heading)))
    assert len(lines) >= 12
    # Shown as examples, filled in by the code.
    values = r"held(?=,)|unavailable(?=,)|acquire|due (?=…)|every-30s|was(?= sent)|is being"
    for line in lines:
        for part in re.sub(values, "…", line).split("…"):
            part = part.strip(" :")
            assert any(part in text for text in said), f"nothing logs {part!r} of {line!r}"


LEVELS = ("info", "warning", "error", "exception", "critical", "log")
REPORTED = re.compile(r"node_(failing|back|unstable|unusable|forgot_lock|left)")
"""Events that are handed on to `Reports.log` with their line."""


def test_each_log_line_has_an_event_id() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value).endswith("logger") and node.func.attr in LEVELS:
                named = "extra" in {keyword.arg for keyword in node.keywords}
                assert named, f"{path.name}:{node.lineno} logs without extra=event(...)"


def test_event_ids_in_the_runbook_are_those_of_the_code() -> None:
    calls = [node for node in nodes() if isinstance(node, ast.Call) and node.args]
    given = [call.args[0] for call in calls if getattr(call.func, "id", "") == "event"]
    ids = {one.value for one in given if isinstance(one, ast.Constant)}
    texts = [one.value for one in nodes() if isinstance(one, ast.Constant)]
    ids |= {text for text in texts if isinstance(text, str) and REPORTED.fullmatch(text)}
    table = section("docs/runbook.md", "Event ids").split("|---|---|")[1]
    documented = re.findall(r"`(\w+)`", table)
    assert sorted(documented) == sorted(ids)


def test_reasons_of_a_loss_in_docs_are_those_of_the_code() -> None:
    lost = given_to("lose")
    assert lost == {"expired", "refused", "max_lifetime"}
    for reason in (*lost, "stalled"):
        assert f'"{reason}"' in section("docs/errors.md", "Errors")
        assert f"`{reason}`" in section("docs/runbook.md", "Log lines")


@pytest.mark.parametrize("option", ["on_conflict", "on_unavailable", "on_lost"])
def test_policies_are_all_documented(option: str) -> None:
    with pytest.raises(ValueError) as refusal:
        settings.TASK[option].check(object())
    text = read("docs/policies.md")
    for value in re.findall(r"'(\w+)'", str(refusal.value)):
        assert f'`"{value}"`' in text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("docs/guarantees.md", f"`{lease.DRIFT_RATE:g} * ttl + {lease.DRIFT_FLOOR:g}`"),
        ("docs/algorithm.md", f"`{lease.DRIFT_RATE:g} * ttl + {lease.DRIFT_FLOOR:g}`"),
        ("docs/algorithm.md", f"Extend every ttl / {round(1 / watchdog.EVERY)}, "),
        ("docs/algorithm.md", f"failed round every ttl / {round(1 / watchdog.RETRY_EVERY)}."),
        ("docs/algorithm.md", f"has not answered for {pipeline.STALLED_S:g} s"),
        ("README.md", f"their ttl ({settings.GLOBAL['ttl'].default:g} s by default)"),
        ("docs/policies.md", f"{settings.GLOBAL['wait'].default:g} s by default"),
        (
            "docs/hot-keys.md",
            f"takes {memory.REQUEST_BYTES // 1000} kB and {memory.BODY_COPIES:g} times its",
        ),
        ("docs/hot-keys.md", f"{prefetch.BACK_AT_ONCE / dispatcher.SWEEP_S:g} messages a second"),
        (
            "docs/policies.md",
            f"a delay of {policy.MIN_PAUSE_S:g} to {policy.MAX_PARKED_PAUSE_S:g} s",
        ),
        ("docs/settings.md", f"comes back within {policy.MAX_PARKED_PAUSE_S:g} s, whatever is set"),
        (
            "docs/glossary.md",
            f"{lease.DRIFT_RATE:.0%} and {lease.DRIFT_FLOOR * 1e3:g} ms".replace("%", " %"),
        ),
        ("docs/beat.md", f"({settings.GLOBAL['node_timeout'].default:g} s)"),
        ("docs/beat.md", f"until the next due time, + {ticks.GRACE_S:g} s"),
        ("docs/beat.md", f"less {ticks.MARGIN_RATE:.0%}".replace("%", " %")),
        ("docs/beat.md", f"at most {ticks.MARGIN_MAX_S:g} s less"),
        ("docs/beat.md", f"about {scheduler.RETRY_DELAY_S:g} s after it has failed"),
        ("docs/beat.md", f"`redlock_ttl` + {scheduler.RETRY_DELAY_S:g} s"),
    ],
)
def test_numbers_in_docs_are_those_of_the_code(page: str, text: str) -> None:
    assert text in " ".join(read(page).split())


@pytest.mark.defaults
def test_redlock_signature_in_docs_has_the_defaults_of_the_code() -> None:
    defaults = celery_redlock.Redlock.__init__.__kwdefaults__ or {}
    assert len(defaults) >= 5
    shown = ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in defaults.items())
    assert f"`Redlock(nodes, {shown})`" in read("docs/python.md")


REFERENCE = re.compile(r"^\.\. auto\w+:: ([\w.]+)$|^\.\. currentmodule:: ([\w.]+)$", re.M)


def test_api_reference_names_exactly_the_public_names() -> None:
    page, module, known = read("docs/api.md"), "", set()
    modules = set(re.findall(r"^\| (celery_redlock[\w.]+) \|", page, re.M))
    for name, current in REFERENCE.findall(page):
        module = current or module
        modules.add(module)
        if name:
            path = name if name.startswith("celery_redlock.") else f"{module}.{name}"
            home, _, last = path.rpartition(".")
            assert hasattr(importlib.import_module(home), last), path
            known.add(last)
    in_tables = {span.rpartition(".")[2] for span in spans("docs/api.md")}
    for public in modules:
        assert set(importlib.import_module(public).__all__) <= known | in_tables, public


def test_api_reference_of_signals_names_their_arguments() -> None:
    table = section("docs/api.md", "Signals")
    said = importlib.import_module("celery_redlock.signals").__doc__ or ""
    carried = re.findall(r"^`(\w+)` \(resource, ([\w, ]+)\)$", said, re.M)
    assert len(carried) == 8
    for name, arguments in carried:
        (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", table, re.M)
        shown = [word for word in re.findall(r"`(\w+)`", row) if word.islower()]
        assert shown == arguments.split(", "), name


def test_every_example_has_a_line_on_the_page_of_examples() -> None:
    row = r"^\| \[`([^`]+)`\]\(\.\./examples/([^)]+)\) \|"
    listed = re.findall(row, read("docs/examples.md"), re.M)
    assert all(shown == path for shown, path in listed)
    there = [path for path in (ROOT / "examples").iterdir() if path.name != "__pycache__"]
    examples = {path.name for path in there if path.is_dir() or path.suffix in (".py", ".yml")}
    assert sorted(path.rstrip("/") for _, path in listed) == sorted(examples)


@pytest.mark.parametrize("page", PAGES)
def test_commands_named_in_docs_exist_with_their_options(page: str) -> None:
    shown = "\n".join([*blocks(page, "sh"), *spans(page)])
    for name, rest in re.findall(r"\bcelery -A \S+ redlock (\w[\w-]*)([^#\n]*)", shown):
        if name.isupper():
            continue  # COMMAND, of any
        command = cli.redlock.get_command(click.Context(cli.redlock), name)
        assert command is not None, f"{page}: redlock {name}"
        known = {option for parameter in command.params for option in parameter.opts}
        for option in re.findall(r"(?<!\S)--[\w-]+", rest):
            assert option in {*known, "--help"}, f"{page}: redlock {name} {option}"


def command_lines(page: str) -> list[list[str]]:
    """Return the words of each command in the shell blocks, the parts of a pipe by themselves."""
    found: list[list[str]] = []
    text = "\n".join([*blocks(page, "sh"), *blocks(page, "console")]).replace("\\\n", " ")
    for line in text.splitlines():
        words = [word for word in shlex.split(line, comments=True) if word != "$"]
        for is_between, part in itertools.groupby(words, ("|", "&", "&&", ";").__contains__):
            if not is_between:
                found.append([*part])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_shell_lines_with_our_commands_parse_to_the_last_word(page: str) -> None:
    for line in command_lines(page):
        if line[0] == "celery" and line[3:4] == ["redlock"]:
            group, words = cli.redlock, line[4:]
        elif line[0].endswith("celery-redlock"):
            group, words = cli.main, line[1:]
        else:
            continue
        try:
            outer = group.make_context("redlock", [*words])
            rest = [*getattr(outer, "_protected_args", ()), *outer.args]
            name, command, rest = group.resolve_command(outer, rest)
            assert command is not None
            command.make_context(name, rest, parent=outer)
        except click.exceptions.Exit:
            pass  # it has shown its help
        except click.ClickException as error:
            pytest.fail(f"{page}: {shlex.join(line)}: {error.format_message()}")
