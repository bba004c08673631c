"""Pages that quote the doctor: it prints these lines about such servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.cli.context import Site
from celery_redlock.cli.doctor import command
from celery_redlock.server import start_servers
from tests.support.nodes import admin
from tests.support.wait import wait_until
from tests.tools.cli.clinic import shop

DOCS = Path(__file__).parents[3] / "docs"
VARIES = r"(?:10\.0\.0\.\d:6379(?:, )?)+", r"\b\d+(?= s\b)"
"""Patterns of what differs from run to run on the pages: nodes' addresses, and seconds."""
MEANS = r"(?:127\.0\.0\.1:\d+(?:, )?)+", r"\d+"
"""The placeholder for each of these. Nodes with equal findings share a line."""


def quoted(page: str, heading: str) -> list[re.Pattern[str]]:
    """Return the lines of the doctor that stand below a heading, as patterns."""
    text = (DOCS / page).read_text("utf-8")
    part = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert part, heading
    found = re.findall(r"^```text\n((?:WRONG|WARNING) .*?)^```$", part[1], re.M | re.S)
    assert found, heading
    return [pattern_of(line) for block in found for line in block.splitlines()]


def pattern_of(line: str) -> re.Pattern[str]:
    parts = re.split("|".join(f"({varies})" for varies in VARIES), line.strip())
    kept, *rest = parts
    pattern = re.escape(kept)
    for at in range(0, len(rest), len(VARIES) + 1):
        (which,) = [n for n in range(len(VARIES)) if rest[at + n] is not None]
        pattern += MEANS[which] + re.escape(rest[at + len(VARIES)])
    return re.compile(pattern)


def printed(urls: list[str], guard: str) -> list[str]:
    app = shop(urls, redlock_restart_guard=guard)
    result = CliRunner().invoke(command, ["--timeout", "1"], obj=Site(app=app))
    return [line.strip() for line in result.output.splitlines()]


def assert_shown(lines: list[re.Pattern[str]], output: list[str]) -> None:
    for line in lines:
        assert any(line.fullmatch(one) for one in output), (line.pattern, output)


@pytest.mark.parametrize(
    ("heading", "nodes"), [("The pause after a start", 3), ("One Redis", 1)], ids=str
)
def test_doctor_prints_the_lines_of_the_page_on_the_restart_guard(heading: str, nodes: int) -> None:
    with start_servers(nodes) as servers:
        assert_shown(
            quoted("restart-guard.md", heading), printed([one.url for one in servers], "auto")
        )


def test_doctor_prints_the_lines_of_the_page_about_a_member_of_a_cluster() -> None:
    """Also a cluster of one shard, which has all slots."""
    with start_servers(1, config=["--cluster-enabled", "yes"]) as (member,):
        lines = quoted("managed-redis.md", "Cluster mode is refused")
        assert_shown(lines, printed([member.url], "uptime"))
        with admin(member) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        assert_shown(lines, printed([member.url], "uptime"))


def test_member_of_a_cluster_is_refused_with_the_error_of_the_page() -> None:
    text = (DOCS / "managed-redis.md").read_text("utf-8")
    (line,) = re.findall(r"^node .* is not usable: .*$", text, re.M)
    with start_servers(1, config=["--cluster-enabled", "yes"]) as (member,):
        redlock = Redlock([member.url])
        try:
            with pytest.raises(ConfigurationError) as refusal:
                redlock.acquire("order:7")
        finally:
            redlock.close()
    assert pattern_of(line).fullmatch(str(refusal.value))


def test_doctor_prints_the_line_of_the_page_about_a_promoted_replica() -> None:
    with start_servers(2) as (primary, replica):
        with admin(replica) as client:
            client.replicaof("127.0.0.1", primary.port)
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up",
                30.0,
                "it replicates",
            )
            client.replicaof("NO", "ONE")
        assert_shown(quoted("managed-redis.md", "Which mode"), printed([replica.url], "uptime"))
        # The default does not see that an address has a failover.
        assert not any("was a replica once" in line for line in printed([replica.url], "auto"))


def test_append_only_file_ends_the_warning_about_a_single_redis() -> None:
    with start_servers(1, config=["--appendonly", "yes"]) as (server,):
        output = printed([server.url], "auto")
    assert not any(line.startswith("WARNING    restart") for line in output)
    assert any(line.startswith("ok ") and " restart," in line for line in output)


def test_single_redis_that_is_guarded_has_no_vote_after_its_start() -> None:
    with start_servers(1) as (server,):
        output = printed([server.url], "uptime")
    assert any("0 of 1 node have a vote" in line for line in output)


def test_checks_named_on_the_checklist_are_on_the_page_of_the_doctor() -> None:
    text = (DOCS / "before-production.md").read_text("utf-8")
    named = re.findall(r"redlock doctor`: ((?:`\w+`(?:, )?)+)", text)
    checks = {name for names in named for name in re.findall(r"\w+", names)}
    known = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "doctor.md").read_text("utf-8"), re.M))
    assert len(checks) >= 10 and checks <= known
