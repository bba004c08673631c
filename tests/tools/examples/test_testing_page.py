"""The examples of docs/testing.md, run by the plugin in a project apart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from celery_redlock import testing

pytest_plugins = ["pytester"]

PAGE = (Path(__file__).parents[3] / "docs" / "testing.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE, re.M | re.S))
QUIET = ("-p", "no:valkey", "-p", "no:docker_tools", "-p", "no:cacheprovider", "-q", "-W", "error")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run it in another process, without the fixtures and imports of this one."""
    return pytester.runpytest_subprocess(*QUIET, *arguments, timeout=120)


def test_every_example_of_the_testing_page_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(**BLOCKS)
    tests = sum(len(re.findall(r"^ *def test_", text, re.M)) for text in BLOCKS.values())
    assert tests == 12
    run(pytester).assert_outcomes(passed=tests)


def test_testing_page_names_all_public_names() -> None:
    types = {"FakeNodes", "LocalNodes"}  # of what the fixtures give
    for name in {*testing.__all__} - types:
        assert f"`{name}" in PAGE, name


def test_pytest_plugin_imports_nothing_until_it_is_used() -> None:
    """It is loaded in every project in whose environment this package is installed."""
    code = (
        "import sys; import celery_redlock.testing.pytest_plugin;"
        "print([m for m in ('redis', 'celery', 'kombu', 'tenacity') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


@pytest.mark.slow
def test_testing_page_examples_fail_and_can_be_overridden_as_it_says(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(
        "import pytest\n@pytest.fixture\ndef redlock_node_count():\n    return 5\n"
    )
    pytester.makepyfile(
        shop=BLOCKS["shop"],
        test_it="""
        from celery_redlock.testing import assert_free, assert_locked, assert_skipped
        from shop import charge

        def test_five(fake_redlock):
            assert len(fake_redlock) == 5

        def test_locked(fake_redlock):
            assert_locked(charge, 1, 5, within=0)

        def test_free(fake_redlock):
            with fake_redlock.hold("order:1"):
                assert_free(charge.s(1, 5), within=0)

        def test_skipped(fake_redlock):
            assert_skipped(charge.apply([1, 5]))

        def test_needs_servers(redlock_nodes):
            pass
        """,
    )
    monkeypatch.setenv("CELERY_REDLOCK_SERVER", "no-such-server")
    result = run(pytester, "-rs")
    result.assert_outcomes(passed=1, failed=3, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "E *AssertionError: order:1 is not locked: it is free on all nodes *, of 5",
            "E *AssertionError: order:1 is not free: locked by pid 1 on another-host (5 of 5 *",
            "E *AssertionError: the task * was not skipped: its body ran and returned 'order *",
            "SKIPPED * redlock_nodes: CELERY_REDLOCK_SERVER='no-such-server' is not a program*",
        ]
    )
    # The reader sees the test's own line, not those of the assertion.
    assert "_eventually" not in result.stdout.str()
