"""Commands over etcd: they show held locks, and find faults of a cluster."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from celery_redlock import Redlock
from celery_redlock.cli import main
from celery_redlock.cli.context import Site
from celery_redlock.doctor.report import ETCD_CHECKS, NEED_APP
from celery_redlock.server import free_port
from celery_redlock.testing.etcd import LocalEtcd
from tests.support.etcd import as_new, ask, start_etcd, text
from tests.support.wait import wait_until
from tests.tools.cli.clinic import examined, found, shop

pytestmark = pytest.mark.usefixtures("no_worker")


@pytest.fixture(scope="module")
def three() -> Iterator[LocalEtcd]:
    with start_etcd(3, "--quota-backend-bytes=2000000", "--bcrypt-cost=4") as started:
        yield started


@pytest.fixture(autouse=True)
def _as_new(three: LocalEtcd) -> None:
    as_new(three)


def call(url: str, *arguments: str) -> Any:
    """Return the result of a command."""
    return CliRunner().invoke(main, ["--nodes", url, *arguments])


def told(url: str, *arguments: str) -> Any:
    result = call(url, *arguments, "--json")
    return json.loads(result.stdout)


def test_etcd_lock_and_waiter_are_shown_and_can_be_released(three: LocalEtcd) -> None:
    holder, waiting = (Redlock([three.url], ttl=20.0, fencing=True) for _ in range(2))
    lease = holder.acquire("order:7")
    granted: list[Any] = []
    thread = threading.Thread(target=lambda: granted.append(waiting.acquire("order:7", wait=30.0)))
    thread.start()
    try:
        wait_until(lambda: entry(three.url)["waiting"] == 1, 20.0, "it stands in line")
        assert entry(three.url)["pid"] == os.getpid()
        assert 18.0 < entry(three.url)["ttls"][0] <= 22.0
        assert entry(three.url)["fence"] == lease.fencing_token
        said = call(three.url, "show", "order:7").output
        assert "waiting: 1" in said
        assert f"fencing token last granted: {lease.fencing_token}" in said
        assert call(three.url, "release", "order:7", "--force").exit_code == 0
        thread.join(20.0)
        (other,) = granted
        assert other.fencing_token > lease.fencing_token
        assert waiting.release(other)
        assert told(three.url, "ls")["entries"] == []
    finally:
        thread.join(30.0)
        holder.close()
        waiting.close()


def entry(url: str) -> Any:
    """Return the entry of the one lock in `ls`."""
    (one,) = told(url, "ls")["entries"]
    return one


def test_doctor_finds_nothing_on_a_healthy_etcd_cluster_and_leaves_nothing(
    three: LocalEtcd,
) -> None:
    code, report = examined(Site(nodes=(three.url,)))
    assert report["findings"] == [] and code == 0
    assert set(report["fine"]) == set(ETCD_CHECKS) - set(NEED_APP)
    assert "kvs" not in ask(three, "kv/range", key=text(b"\0"), range_end=text(b"\0"))
    _code, report = examined(Site(app=shop([three.url])))
    assert [one["check"] for one in report["findings"]] == ["workers"]


def test_doctor_finds_an_etcd_member_that_is_away_or_alone(three: LocalEtcd) -> None:
    three.members[2].kill()
    for member in three.members[:2]:
        member.wait()  # there may have to be another leader
    _code, report = examined(Site(nodes=(three.url,)))
    assert f":{three.members[2].port}" in found(report, "warning")["members"]["what"]
    _code, report = examined(Site(nodes=(f"etcd://127.0.0.1:{three.port}",)))
    assert "names one member" in found(report, "warning")["members"]["what"]


def test_doctor_finds_two_etcd_clusters_in_one_url(three: LocalEtcd) -> None:
    with start_etcd() as other:
        url = f"{three.url},127.0.0.1:{other.port}"
        code, report = examined(Site(nodes=(url,)))
    assert code == 1
    assert "of several clusters" in found(report, "wrong")["members"]["what"]


def test_doctor_finds_an_unreachable_etcd_cluster() -> None:
    code, report = examined(Site(nodes=(f"etcd://127.0.0.1:{free_port()}",)))
    assert code == 1
    assert "no member can be asked" in found(report, "wrong")["reachable"]["what"]


def test_doctor_checks_etcd_users_and_the_documented_role_suffices(three: LocalEtcd) -> None:
    """A missing user, or one with fewer rights, is found."""
    role = {"key": text(b"redlock:"), "range_end": text(b"redlock;")}
    ask(three, "auth/user/add", name="root", password="SECRET")
    ask(three, "auth/user/grant", user="root", role="root")
    for name in ("shop", "poor"):
        ask(three, "auth/role/add", name=name)
        ask(three, "auth/user/add", name=name, password="SECRET")
        ask(three, "auth/user/grant", user=name, role=name)
    ask(three, "auth/role/grant", name="shop", perm={"permType": "READWRITE", **role})
    hosts = three.url.removeprefix("etcd://")
    redlock = Redlock([f"etcd://shop:SECRET@{hosts}"], ttl=20.0)
    lease = redlock.acquire("r")  # they are named before they are asked for
    ask(three, "auth/enable")
    try:
        assert redlock.release(lease)
        lease = redlock.extend(redlock.acquire("r", wait=5.0))
        assert redlock.release(lease)
        redlock.close()
        code, report = examined(Site(nodes=(f"etcd://shop:SECRET@{hosts}",)))
        assert (code, report["findings"]) == (0, [])
        _code, report = examined(Site(nodes=(f"etcd://poor:SECRET@{hosts}",)))
        assert "permission denied" in str(found(report, "wrong").get("rights", report))
        assert "rights says why" in found(report, "wrong")["quorum"]["what"]
        _code, report = examined(Site(nodes=(three.url,)))
        assert set(found(report, "wrong")) & {"rights", "reachable"}
        _code, report = examined(Site(nodes=(f"etcd://shop:wrong@{hosts}",)))
        assert "it requires a login" in found(report, "wrong")["reachable"]["what"]
    finally:
        three.reset()


def test_doctor_finds_an_etcd_cluster_without_space(three: LocalEtcd) -> None:
    for n in range(40):
        try:
            ask(three, "kv/put", key=text(b"big%d" % n), value=text(b"x" * 200_000))
        except Exception:
            break
    try:
        code, report = examined(Site(nodes=(three.url,)))
        assert code == 1
        assert "its space is used up" in found(report, "wrong")["writes"]["what"]
        assert "writes says why" in found(report, "wrong")["quorum"]["what"]
    finally:
        three.reset()
