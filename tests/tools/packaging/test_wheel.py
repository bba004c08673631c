"""The wheel: its contents and metadata, and that it runs with its declared requirements alone."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.tools.packaging.conftest import ROOT, run

README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


@pytest.fixture(scope="module")
def about(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(opened.read(name).decode())


def test_wheel_holds_the_whole_package_and_nothing_else(names: set[str]) -> None:
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "celery_redlock").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "celery_redlock/py.typed" in package
    beside = {name for name in names - package if ".dist-info/" not in name}
    assert (package - names, beside) == (set(), set())


def test_wheel_metadata_names_versions_requirements_and_licence(
    names: set[str], wheel: Path, about: Message
) -> None:
    (licence,) = (name for name in names if name.endswith("/licenses/LICENSE"))
    with zipfile.ZipFile(wheel) as opened:
        assert opened.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert (about["License-Expression"], about["License-File"]) == ("MIT", "LICENSE")
    assert about["Name"] == "celery-redlock"
    assert about["Requires-Python"] == ">=3.10"
    assert about["Description-Content-Type"] == "text/markdown"
    classifiers = about.get_all("Classifier", [])
    rows = (ROOT / "tox.ini").read_text("utf-8")
    for minor in range(10, 15):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
        assert f"py3{minor}-" in rows, f"no row of tox.ini runs on Python 3.{minor}"
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    words = {line.split("<")[0].split(">")[0] for line in needed}
    assert words == {"celery", "kombu", "packaging", "redis", "tenacity"}


def test_description_is_the_readme_without_links_to_files(about: Message) -> None:
    text = str(about.get_payload())
    blocks = re.findall(r"^```.*?^```$", README, re.M | re.S)
    assert blocks and re.findall(r"^```.*?^```$", text, re.M | re.S) == blocks
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert re.findall(r"^#+ .+$", rest, re.M) == re.findall(
        r"^#+ .+$", re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S), re.M
    )
    targets = re.findall(r"\]\(([^)]+)\)", rest) + re.findall(r"(?:href|src)=\"([^\"]+)", rest)
    assert [target for target in targets if not target.startswith("https://")] == []


def test_dependency_groups_are_known_to_the_set_up_and_unknown_to_users(about: Message) -> None:
    toml = pytest.importorskip("tomllib")
    declared = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    assert spec and spec.loader
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    groups = set(declared["dependency-groups"])
    assert bootstrap.groups() == groups >= {"test", "docs", "lint"}
    extras = set(about.get_all("Provides-Extra", []))
    assert extras == set(declared["project"]["optional-dependencies"]) and not extras & groups
    named = re.findall(r"(?:\$\(SETUP\)|FOR_\w+ :=)(.*)", (ROOT / "Makefile").read_text("utf-8"))
    words = {word for line in named for word in re.sub(r"\$\(.*?\)+", "", line).split()}
    assert words <= extras | groups


def test_each_entry_point_names_an_existing_object(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("/entry_points.txt"))
        declared = opened.read(name).decode()
    points = re.findall(r"^(\w[\w-]*) = ([\w.]+):(\w+)$", declared, re.M)
    modules = re.findall(r"^(\w[\w-]*) = ([\w.]+)$", declared, re.M)
    assert "[opentelemetry_instrumentor]" in declared
    assert len(points) + len(modules) == declared.count("=") > 4
    assert "[celery_redlock.stores]" in declared
    for _name, module, attribute in points:
        assert getattr(importlib.import_module(module), attribute)
    for _name, module in modules:
        importlib.import_module(module)


def test_sdist_is_complete_and_holds_nothing_generated(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    assert held >= {"pyproject.toml", "LICENSE", "README.md", "docs/index.md", "Makefile"}
    assert "tests/tools/packaging/test_wheel.py" in held
    generated = ("__pycache__", ".venv", ".tox", ".pyc", "_cache", ".bench")
    assert [name for name in held if any(word in name for word in generated)] == []


def test_wheel_is_complete_and_imports_without_a_warning(base: Path, tmp_path: Path) -> None:
    program = "import celery_redlock as c; c.locked; print(c.__file__, c.__version__)"
    said = run(base, "-W", "error", "-c", program, cwd=tmp_path)
    file, version = said.split()
    assert str(base.parents[1]) in file
    assert f"celery_redlock-{version}" in ",".join(
        path.name for path in base.parents[1].rglob("*.dist-info")
    )


BESIDE_SITES = {"demo", "testing"}


def test_extra_all_has_every_extra_of_a_running_site(about: Message) -> None:
    wanted: dict[str, set[str]] = {}
    for line in about.get_all("Requires-Dist", []):
        what, _, marker = line.partition(";")
        if found := re.search(r"extra == '(\w+)'", marker):
            wanted.setdefault(found[1], set()).add(what)
    sites = [wanted[extra] for extra in wanted.keys() - BESIDE_SITES - {"all"}]
    assert len(sites) >= 5
    assert wanted["all"] == set.union(*sites)


def test_celery_finds_the_commands_of_the_wheel(base: Path, tmp_path: Path) -> None:
    """The script `celery-redlock` runs in the tests of extras."""
    said = run(base, "-m", "celery", "--help", cwd=tmp_path)
    assert "redlock" in said and "Traceback" not in said


COMMANDS = """\
import json
from click.testing import CliRunner
from celery_redlock.cli import COMMANDS, main
print(json.dumps({name: CliRunner().invoke(main, [name, "--help"]).exit_code for name in COMMANDS}))
"""


def test_every_command_has_help_without_any_extra(base: Path, tmp_path: Path) -> None:
    codes = json.loads(run(base, "-c", COMMANDS, cwd=tmp_path).splitlines()[-1])
    assert codes and set(codes.values()) == {0}, codes


MODULES = """\
import importlib, json
from pkgutil import walk_packages
import celery_redlock as c
said = {}
for module in walk_packages(c.__path__, "celery_redlock.", onerror=lambda name: None):
    if not module.name.endswith(("__main__", "demo.app")):  # programs
        try:
            importlib.import_module(module.name)
        except Exception as error:
            said[module.name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


BEHIND = (
    *("celery_redlock.web.", "celery_redlock.cli.live", "celery_redlock.testing.pytest_plugin"),
    *("celery_redlock.stores.postgresql.", "celery_redlock.stores.zookeeper."),
    "celery_redlock.contrib.django.",
)
"""Imported by others only, when what they need is there: see the next test."""


def test_module_that_needs_an_extra_names_it(base: Path, tmp_path: Path) -> None:
    """All other modules are imported without any extra."""
    said = json.loads(run(base, "-c", MODULES, cwd=tmp_path).splitlines()[-1])
    dumb = {name: words for name, words in said.items() if "celery-redlock[" not in words}
    assert [(name, words) for name, words in dumb.items() if not name.startswith(BEHIND)] == []
    assert all("ModuleNotFoundError: No module named" in words for words in dumb.values())


@pytest.mark.parametrize(
    ("command", "extra"), [("exporter --once", "prometheus"), ("web --listen 127.0.0.1:0", "web")]
)
def test_command_that_needs_an_extra_names_it(
    command: str, extra: str, base: Path, tmp_path: Path
) -> None:
    nodes = ["--nodes", "redis://127.0.0.1:1/0"]
    said = run(base.parent / "celery-redlock", *nodes, *command.split(), cwd=tmp_path, check=False)
    assert f'pip install "celery-redlock[{extra}]"' in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_pip_installs_the_wheel_with_its_requirements(wheel: Path, tmp_path: Path) -> None:
    """They come from the index that pip is configured for."""
    run(sys.executable, "-m", "venv", tmp_path / "new")
    python = tmp_path / "new" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    assert "No broken requirements" in run(python, "-m", "pip", "check")
    assert "Commands:" in run(tmp_path / "new" / "bin" / "celery-redlock", "--help", cwd=tmp_path)
    assert "redlock" in run(tmp_path / "new" / "bin" / "celery", "--help", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["cli", "prometheus", "otel", "web"])
def test_pip_installs_each_extra(extra: str, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "new")
    python = tmp_path / "new" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", f"{wheel}[{extra}]", cwd=tmp_path)
    assert "No broken requirements" in run(python, "-m", "pip", "check")
