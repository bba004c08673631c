"""Commands and workers agree on the vote of a node."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from celery import Celery

from celery_redlock import Redlock
from celery_redlock.doctor.nodes import examine_nodes
from celery_redlock.doctor.probe import Answers, Probe
from celery_redlock.doctor.votes import votes_in, votes_left
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.survey.models import NodeLook
from celery_redlock.web import health

PROMOTED = NodeInfo(run_id="r", role="master", uptime=900.0, history="old", replication="new")
MARKED = replace(PROMOTED, mark=f"12.0 {PROMOTED.memory}")
STARTED = NodeInfo(run_id="r", role="master", uptime=5.0)
PLAIN, SENTINEL = "redis://127.0.0.1:1", "sentinel://127.0.0.1:1/service"


def seconds_of_a_worker(url: str, facts: NodeInfo) -> float:
    """Return for how long a worker that meets the node now gives it no vote."""
    with closing(Redlock([url], ttl=30.0, restart_guard="uptime")) as redlock:
        (node,) = redlock.client.driver.nodes
        node._trust.connected(facts, 0.0, 0.0)
        left: float = getattr(node._trust.doubt(0.0), "left", 0.0)
        return left


@pytest.mark.parametrize("url", [PLAIN, SENTINEL])
@pytest.mark.parametrize("facts", [PROMOTED, MARKED, STARTED], ids=["promoted", "marked", "new"])
def test_commands_and_workers_count_the_same_seconds_until_a_node_votes(
    url: str, facts: NodeInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = seconds_of_a_worker(url, facts)
    assert wait > 0
    addresses = parse_nodes([url])
    assert votes_left([facts], addresses, [30.0], "uptime") == [wait]
    app = Celery("shop", set_as_current=False, broker="memory://")
    app.conf.update(redlock_restart_guard="uptime", redlock_ttl=30.0)
    assert votes_in([facts], addresses, app) == wait
    look = NodeLook("n", True, "", 0.001)
    probe = Probe(0, addresses[0], look, Answers(facts=facts, info={}))
    every = list(examine_nodes([probe], "redlock:", [30.0], "uptime"))
    assert [one for one in every if f"no vote for {wait:.0f} s" in str(one)]
    monkeypatch.setattr(health, "observe", lambda *_given: [probe])
    with closing(Redlock([url], ttl=30.0, restart_guard="uptime")) as redlock:
        assert health.examine(redlock, None, 1.0).nodes[0]["votes_in"] == wait
    app.close()
