"""The dashboard, the alerts and the page: every metric and label that they name is really there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_redlock import Redlock, ResourceHeld
from celery_redlock.events import NODE_FAILURES
from celery_redlock.locking import pauses
from celery_redlock.messages import signals
from celery_redlock.metrics import BUCKETS, install
from celery_redlock.protocol.names import RESERVED_SUFFIX
from celery_redlock.protocol.values import Owner
from celery_redlock.server import start_servers
from celery_redlock.survey.exporter import exposition, make_registry
from celery_redlock.survey.waiting import Parked

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "grafana/celery-redlock.json").read_text("utf-8"))
GROUPS = yaml.safe_load((ROOT / "grafana/alerts.yml").read_text("utf-8"))["groups"]
ALERTS: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [
    *((panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]),
    *((alert["alert"], alert["expr"]) for alert in ALERTS),
]
NAME = re.compile(r"\bcelery_redlock_\w+")
CHARGE = Owner("web-1", 42, "id", task="shop.charge")


class Exposed:
    """Metrics of a process and of the exporter, after some traffic.

    Attributes:
        labels: The labels of each sample, by its name.
        families: Type and help of each metric, by its name without `_total`.
    """

    def __init__(self, texts: list[str]) -> None:
        self.labels: dict[str, set[str]] = {}
        self.families: dict[str, tuple[str, str]] = {}
        for text in texts:
            for family in text_string_to_metric_families(text):
                if family.name.endswith("_created"):
                    continue  # prometheus_client's own
                self.families[family.name] = (family.type, family.documentation)
                for sample in family.samples:
                    self.labels.setdefault(sample.name, set()).update(sample.labels)


@pytest.fixture(scope="module")
def exposed() -> Iterator[Exposed]:
    installed = install(CollectorRegistry())
    try:
        with start_servers(3) as servers:
            redlock = Redlock([server.url for server in servers], restart_guard="off")
            redlock.connect(30.0)
            with redlock.lock("r", owner=CHARGE), pytest.raises(ResourceHeld):
                redlock.acquire("r")
            pauses.begin(redlock, "r*", 60.0, "somebody")
            lease = redlock.acquire("r", owner=CHARGE)
            redlock.extend(lease)
            signals.task_skipped.send(sender=None, where="run")
            for server in servers:
                with redis.Redis(port=server.port) as client:
                    token = CHARGE.token("0" * 32, 1.0)
                    client.set(f"redlock:q{RESERVED_SUFFIX}", token, px=60_000)
                    client.zadd("redlock:r#line", {"somebody": 1.0})
            options: Any = {"parked": Parked, "votes_in": lambda: 0.0, "runbook": "r"}
            texts = [exposition(make_registry(redlock, timeout=30.0, **options))]
            redlock.close()
        texts.append(generate_latest(installed.registry).decode())
    finally:
        installed.close()
    yield Exposed(texts)


def test_metrics_and_labels_in_dashboard_and_alerts_exist(exposed: Exposed) -> None:
    for where, expression in EXPRESSIONS:
        _check(where, expression, exposed)


def _check(where: str, expression: str, exposed: Exposed) -> None:
    names = NAME.findall(expression)
    assert names
    known = {"le"}
    for name in names:
        assert name in exposed.labels, f"{where}: {name}"
        known |= exposed.labels[name]
    by = re.findall(r"\b(?:by|without|on|ignoring) ?\(([^)]*)\)", expression)
    used = {label.strip() for found in by for label in found.split(",")}
    used |= set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression))
    assert used <= known, f"{where}: {used - known}"


def test_legends_and_alert_texts_name_labels_that_their_expression_keeps() -> None:
    texts = [
        *(
            (target["expr"], target["legendFormat"])
            for panel in PANELS
            for target in panel["targets"]
        ),
        *((alert["expr"], alert["annotations"]["summary"]) for alert in ALERTS),
    ]
    named = 0
    for expression, text in texts:
        by = ",".join(re.findall(r"\bby \(([^)]*)\)", expression))
        for label in re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text):
            assert label in re.split(r"[, ]+", by), f"{text}: {label}"
            named += 1
    assert named > 20


def test_losses_and_stalled_bodies_are_shown_apart() -> None:
    lost = [expression for _where, expression in EXPRESSIONS if "lost_total" in expression]
    stalled = [expression for expression in lost if 'reason="stalled"' in expression]
    assert len(stalled) == 1 and len(lost) > 2
    for expression in lost:
        assert 'reason!="stalled"' in expression or expression in stalled


def test_every_metric_has_a_dashboard_panel(exposed: Exposed) -> None:
    shown = " ".join(expression for _where, expression in EXPRESSIONS)
    unseen = {name for name in exposed.families if name not in shown}
    assert unseen == {
        *("celery_redlock_nodes", "celery_redlock_survey_errors", "celery_redlock_runbook")
    }


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_has_severity_summary_and_runbook_section(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["annotations"]["summary"]
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    start = (
        '{{ with query "last_over_time(celery_redlock_runbook[1d])" }}{{ first . | label "url" }}'
    )
    assert page.startswith(start)
    page = page.removeprefix(start + "{{ else }}").removesuffix("{{ end }}")
    headings = re.findall(r"^## (.+)$", (ROOT / page).read_text("utf-8"), re.M)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_promtool_accepts_rules_and_panels(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    panels = tmp_path / "panels.yml"
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__rate_interval", "5m", expression)}
        for number, (_where, expression) in enumerate(EXPRESSIONS)
    ]
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for command in (
        ["check", "rules", "alerts.yml", str(panels)],
        ["test", "rules", "alerts_test.yml"],
    ):
        done = subprocess.run(
            [promtool, *command], cwd=ROOT / "grafana", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_page_lists_each_metric_with_kind_and_labels(exposed: Exposed) -> None:
    page = (ROOT / "docs/metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `(celery_redlock_\w+)` \| (\w+) \|([^|]*)\|([^|]*)\|", page, re.M)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", of))) for name, kind, of, _unit in rows}
    real = {}
    for family, (kind, _help) in exposed.families.items():
        name = f"{family}_total" if kind == "counter" else family
        sample = f"{name}_count" if kind == "histogram" else name
        real[name] = (kind, exposed.labels[sample])
    assert documented == real
    for name, _kind, _of, unit in rows:
        assert (unit.strip() == "seconds") == name.endswith("_seconds"), name


def test_metrics_page_names_each_kind_of_failure_and_each_histogram() -> None:
    page = (ROOT / "docs/metrics.md").read_text("utf-8")
    for word in (*NODE_FAILURES, *BUCKETS):
        assert f"`{word}`" in page, word
