"""The pages of docs/recipes do what they say: the code of each, run with real servers.

Times are shorter than on the pages where a test would have to wait for them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from celery import Celery, group

from celery_redlock import (
    ConfigurationError,
    DuplicateTask,
    Redlock,
    ResourceHeld,
    Skipped,
    current_lease,
)
from celery_redlock.config.task_lock import resource_of
from celery_redlock.server import LocalServer
from tests.support.nodes import admin
from tests.support.recipes import Work, blocks, queued, running, value
from tests.support.wait import wait_until


def takes(*arguments: str) -> Any:
    """A function with these arguments, to be declared as a task."""
    names: dict[str, Any] = {}
    exec(f"def function({', '.join(arguments)}): ...", names)
    return names["function"]


def test_recipe_one_at_a_time_runs_one_body_an_order(server: LocalServer) -> None:
    work, mails = Work(), Work(endless=False)
    with running("one-at-a-time", server, pay=work, mail=mails) as shop:
        charges = [shop.charge.delay(7, 50)]
        work.at((7, 50))
        charges += [shop.charge.delay(7, 20), shop.charge.delay(8, 10)]
        work.at((7, 50), (8, 10))
        skipped = Skipped.of(value(shop.remind.delay(7)))
        assert skipped is not None and skipped["resource"] == "order:7"
        assert Skipped.of(value(shop.remind.delay(9))) is None
        assert work.begun == [(7, 50), (8, 10)] and mails.begun == [(9,)]
        work.go()
        assert [value(charge) for charge in charges] == [None, None, None]
    assert work.begun[2] == (7, 20)


def test_recipe_one_queued_keeps_one_running_and_one_queued(server: LocalServer) -> None:
    work = Work()
    with running("one-queued", server, build=work) as shop:
        first = shop.reindex.delay(7)
        work.at((7,))
        others = {shop.reindex.delay(7).id for _ in range(10)}
        assert len(others) == 1 and first.id not in others
        with pytest.raises(DuplicateTask):
            shop.reindex.apply_async((7,), lock={"on_duplicate": "raise"})
        work.go()
        wait_until(lambda: work.begun == [(7,), (7,)], 10.0, "the second has run")
        assert value(shop.reindex.AsyncResult(*others)) is None
    assert len(work.begun) == 2


SOON = {"countdown=10": "countdown=2"}
"""On a busy machine as well, there is less between two calls of a burst."""


def test_recipe_debounce_runs_the_last_call(server: LocalServer) -> None:
    mails = Work()
    with running("debounce", server, SOON, mail=mails) as shop:
        *replaced, last = [shop.changed(7, text) for text in "abcd"]
        other = shop.changed(8, "x")
        mails.at((7, "d"), (8, "x"))
        later = shop.changed(7, "e")  # the one that has begun is left alone
        mails.go()
        assert (value(last), value(other), value(later)) == (None, None, None)
        wait_until(lambda: all(one.state == "REVOKED" for one in replaced), 10.0, "all revoked")
    assert mails.begun[-1] == (7, "e") and len(mails.begun) == 3


def test_recipe_throttle_starts_at_most_so_many_in_a_period(server: LocalServer) -> None:
    """The last of any four calls in a row is let in one period after the first."""
    period = 1.5
    let_in: list[float] = []
    times = {"hold_for=60": f"hold_for={period}"}
    mails = Work(endless=False)

    class Fails(Work):
        def __call__(self, *args: Any) -> Any:
            let_in.append(current_lease().lease.granted_at)
            raise OSError("a body that fails holds its place as well")

    with running("throttle", server, times, download=Fails(endless=False), mail=mails) as shop:
        pages = [shop.fetch.delay(1, page) for page in range(7)]
        assert value(shop.alarm.delay("web1", "down")) is None
        assert Skipped.of(value(shop.alarm.delay("web1", "down still")))
        redlock = Redlock.from_app(shop.app)

        def left() -> float:
            cooling = redlock.holder("alarm:web1")
            return cooling.expires_in if cooling is not None else 0.0

        wait_until(lambda: 200 < left() <= 300, 5, "it cools down")  # behind its result
        assert all(isinstance(value(page), OSError) for page in pages)
    let_in.sort()
    apart = [late - early for early, late in zip(let_in, let_in[3:], strict=False)]
    assert len(apart) == 4 and min(apart) > period - 0.05, apart
    assert mails.begun == [("web1", "down")]


def test_recipe_at_most_k_runs_three_of_each_supplier(server: LocalServer) -> None:
    work = Work()
    with running("at-most-k", server, download=work) as shop:
        pages = [shop.fetch.delay(1, page) for page in range(5)]
        wait_until(lambda: len(work.now) == 3, 10.0, "three are at work")
        assert shop.busy(1) == 3 and shop.busy(2) == 0
        other = shop.fetch.delay(2, 9)
        wait_until(lambda: (2, 9) in work.now, 10.0, "another supplier has places of its own")
        assert len(work.begun) == 4
        work.go()
        assert [value(page) for page in [*pages, other]] == [None] * 6
        for refused in ({"fencing": True}, {"on_conflict": "replace"}):
            with pytest.raises(ConfigurationError, match="limit"):
                shop.locked("supplier:<page>", limit=3, **refused)(takes("page"))


class Order:
    """A value that only pickle can send."""

    def __init__(self, pk: int) -> None:
        self.pk = pk


def test_recipe_nested_key_locks_by_the_nested_id(server: LocalServer) -> None:
    with running("nested-key", server) as shop:
        event = {"order": {"id": 7}}
        assert resource_of(shop.handle, (event,), {}) == "order:7"
        assert resource_of(shop.charge, (7,), {}) == "order:7"
        assert resource_of(shop.ship, (Order(7),), {}) == "order:7"
        assert resource_of(shop.charge, ("7",), {}) != "order:7"
        with Redlock([server.url]).lock("order:7"):
            sent = [shop.handle.delay(event), shop.ship.delay(Order(7))]
            shop.paid(Order(8))
            with pytest.raises(ResourceHeld):
                shop.handle(event)
            assert not any(one.ready() for one in sent)
        assert [value(one) for one in sent] == [None, None]
        assert isinstance(value(shop.handle.delay({})), ConfigurationError)
        with pytest.raises(ConfigurationError, match="give a function"):
            shop.locked("order:<order.id>")(takes("order"))


def test_recipe_tenants_locks_by_tenant_and_order(server: LocalServer) -> None:
    work = Work()
    dumps = Work()
    with running("tenants", server, pay=work, dump=dumps) as shop:
        shop.open_session = lambda: "session"
        charges = [shop.charge_for(tenant, 7) for tenant in ("acme", "other")]
        work.at(("session", 7), ("session", 7))
        skipped = Skipped.of(value(shop.charge_for("acme", 7)))
        assert skipped is not None and skipped["resource"] == "acme:7"
        failed = value(shop.charge.delay(7))
        assert isinstance(failed, ConfigurationError) and "the header 'tenant'" in str(failed)
        assert resource_of(shop.export, ("acme", "orders"), {}) == "exports:acme"
        work.go()
        assert [value(charge) for charge in charges] == [None, None]
        exports = [shop.export.delay("acme", table) for table in range(4)]
        wait_until(lambda: len(dumps.now) == 3, 10.0, "three of a tenant are at work")
        other = shop.export.delay("other", 9)
        wait_until(lambda: ("other", 9) in dumps.now, 10.0, "another has places of its own")
        assert len(dumps.begun) == 4
        dumps.go()
        assert [value(one) for one in [*exports, other]] == [None] * 5


def test_recipe_two_tasks_share_the_lock_of_an_order(server: LocalServer) -> None:
    payments, refunds = Work(), Work()
    with running("two-tasks", server, pay=payments, refund=refunds) as shop:
        charged = shop.charge.delay(7, 50)
        payments.at((7, 50))
        cancelled = [shop.cancel.delay(7), shop.cancel.delay(8)]
        refunds.at((8,))
        redlock = Redlock.from_app(shop.app)
        assert redlock.try_acquire("order:7") is None
        payments.go()
        assert value(charged) is None  # with what it calls
        refunds.at((7,), (8,))
        with pytest.raises(ResourceHeld):
            redlock.acquire("order:7")
        refunds.go()
        assert [value(one) for one in cancelled] == [None, None]
        shop.by_hand(7)
        assert refunds.begun == [(8,), (7,), (7,)]
        for name in ("a", "b"):
            shared = shop.locked(["order_id"], scope_name="order")(takes("order_id"))
            assert resource_of(shop.app.task(name=name)(shared), (7,), {}) == "order(order_id=7)"


def test_recipe_nightly_skips_while_the_last_run_is_at_work(server: LocalServer) -> None:
    work = Work()
    with running("nightly", server, collect=work) as shop:
        run = shop.rebuild.delay()
        work.at(())
        assert Skipped.of(value(shop.rebuild.delay()))
        work.go()
        assert Skipped.of(value(run)) is None


def test_recipe_chord_runs_each_member_once(server: LocalServer) -> None:
    work = Work()
    with running("chord", server, pay=work) as shop:
        settled = shop.settle()
        wait_until(lambda: {order for order, _ in work.now} == {7, 8}, 10.0, "both are charged")
        assert len(work.now) == 2
        surveyed = shop.survey()
        wait_until(lambda: queued(server) == 0, 10.0, "all members are with the worker")
        assert len(work.begun) == 2
        work.go()
        assert value(settled) == [50, 20, 10]
        assert set(value(surveyed)) <= {"a", "b", "c"}
        with Redlock.from_app(shop.app).lock("order:7", wait=10.0):  # results come first
            assert value(shop.survey()) == ["c"]
        assert value(shop.survey.__globals__["settle"]()) == [50, 20, 10]


def test_recipe_fastapi_sends_one_task_for_many_clicks(server: LocalServer) -> None:
    work = Work()

    async def ask(method: str, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(shop.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.request(method, path)

    def asked(method: str, path: str) -> httpx.Response:
        return asyncio.run(ask(method, path))

    with running("fastapi", server, {"wait=1.0": "wait=0.1"}, build=work) as shop:
        clicks = [asked("POST", "/reports/7") for _ in range(3)]
        assert {click.status_code for click in clicks} == {202}
        (task,) = {click.json()["task"] for click in clicks}
        work.at((7,))
        held = asked("DELETE", "/reports/7")
        assert held.status_code == 409 and "host" not in held.text
        assert asked("DELETE", "/reports/8").status_code == 200
        work.go()
        assert value(shop.rebuild.AsyncResult(task)) == 7
        assert asked("GET", f"/tasks/{task}").json() == {"state": "SUCCESS"}
        assert asked("DELETE", "/reports/7").status_code == 200
        assert asked("POST", "/reports/7").json()["task"] != task
        server.pause()
        try:
            assert asked("DELETE", "/reports/7").status_code == 503
        finally:
            server.resume()


def test_recipe_coming_from_keeps_the_behaviour_of_other_libraries(server: LocalServer) -> None:
    work = Work()
    with running("coming-from", server, work=work) as shop:
        settled, rebuilt = shop.settle.delay(1, 50), shop.rebuild.delay(2, "en")
        charged = [shop.charge.delay(3), shop.charge.delay(3)]
        work.at((1,), (2,), (3,))
        assert Skipped.of(shop.settle.delay(1, 20).result)
        assert shop.rebuild.delay(2, "de").id == rebuilt.id
        work.go()
        assert [value(one) for one in (settled, rebuilt, *charged)] == [None] * 4
        assert work.begun.count((3,)) == 2


def test_recipe_coming_from_works_with_another_import_at_first(server: LocalServer) -> None:
    names: dict[str, Any] = {"__name__": "before", "app": Celery("before", broker=server.url)}
    for before in blocks("coming-from", "py"):
        for old in ("once", "singleton"):
            before = before.replace(f"from celery_{old} ", f"from celery_redlock.compat.{old} ")
        exec(compile(before, "coming-from.md", "exec"), names)
    first, graceful = [names["settle"].delay(1, amount) for amount in (50, 20)]
    assert first.id != graceful.id and (graceful.state, graceful.result) == ("REJECTED", None)
    assert names["rebuild"].delay(2, "en").id == names["rebuild"].delay(2, "de").id
    assert queued(server) == 2
    Redlock.from_app(names["app"]).close()
    names["app"].close()


def test_recipe_queued_already_tells_a_duplicate_by_flag_409_and_result(
    server: LocalServer,
) -> None:
    work = Work()
    with running("queued-already", server, build=work) as shop:
        first, status = shop.flag(7)
        assert (first["queued_already"], status) == (False, 202)
        work.at((7,))
        for again in range(2):
            assert shop.flag(7) == ({"task": first["task"], "queued_already": True}, 202), again
        refused, status = shop.refuse(7)
        assert (refused["task"], status) == (first["task"], 409)
        other, status = shop.refuse(8)
        assert status == 202
        members = group(shop.rebuild.s(7), shop.rebuild.s(9)).delay()
        duplicate, own = members.results
        wait_until(duplicate.ready, 10.0, "the duplicate ends")
        assert shop.was_duplicate(duplicate) and not shop.was_duplicate(own)
        skipped = shop.rebuild.apply_async((7,), lock={"on_duplicate": "skip"})
        assert shop.was_duplicate(skipped)
        work.go()
        ended = [shop.rebuild.AsyncResult(task["task"]) for task in (first, other)]
        assert [value(one) for one in [*ended, own]] == [7, 8, 9]
        assert not any(shop.was_duplicate(one) for one in [*ended, own])
        wait_until(lambda: shop.refuse(7)[1] == 202, 10.0, "its key is free")


def test_recipe_in_order_handles_events_in_the_order_of_the_list(server: LocalServer) -> None:
    """Further events come while one is handled; one fails at first."""
    failed: list[str] = []

    class Fails(Work):
        def __call__(self, *args: Any) -> Any:
            if args[1] == "sent" and not failed:
                failed.append(args[1])
                raise OSError("away for a moment")
            return super().__call__(*args)

    work = Fails()
    with running("in-order", server, handle=work) as shop:
        shop.happened(7, "ordered")
        work.at((7, "ordered"))
        for event in ("paid", "packed", "sent", "received"):
            shop.happened(7, event)
        shop.happened(8, "ordered")
        work.at((7, "ordered"), (8, "ordered"))
        wait_until(lambda: queued(server) == 0, 10.0, "the worker has all messages")
        work.go()
        wait_until(lambda: not shop.store.exists("events:7", "events:8"), 20.0, "all is handled")
    handled = [event for customer, event in work.begun if customer == 7]
    assert handled == ["ordered", "paid", "packed", "sent", "received"]
    assert failed == ["sent"]


def test_recipe_in_order_goes_on_after_an_error_with_the_next_call(server: LocalServer) -> None:
    work, broken = Work(endless=False), [True]

    class Breaks(Work):
        def __call__(self, *args: Any) -> Any:
            if broken:
                raise ValueError("no temporary error")
            return work(*args)

    with running("in-order", server, handle=Breaks()) as shop:
        shop.happened(7, "ordered")
        wait_until(lambda: shop.store.llen("events:7") == 1, 5.0, "it is in the list")
        assert isinstance(value(shop.drain.delay(7)), ValueError)
        assert shop.store.lrange("events:7", 0, -1) == ["ordered"]
        broken.clear()
        shop.happened(7, "paid")
        wait_until(lambda: not shop.store.exists("events:7"), 10.0, "both are handled")
    assert work.begun == [(7, "ordered"), (7, "paid")]


def test_recipe_once_a_day_sends_one_task_a_day_and_again_after_a_failure(
    server: LocalServer,
) -> None:
    work = Work()

    class Fails(Work):
        def __call__(self, *args: Any) -> Any:
            raise OSError("no mail server")

    with running("once-a-day", server, mail=work) as shop:
        first = shop.visited(7)
        wait_until(lambda: len(work.now) == 1, 10.0, "it is at work")
        assert shop.visited(7).id == first.id
        other = shop.visited(8)
        assert other.id != first.id
        work.go()
        assert [value(one) for one in (first, other)] == [None, None]
        assert shop.visited(7).id == first.id
        tomorrow = shop.digest.delay(7, "2099-01-01")
        assert value(tomorrow) is None
        shop.mail = Fails()
        failed = shop.visited(9)
        assert isinstance(value(failed), OSError)
        shop.mail = work
        wait_until(lambda: shop.visited(9).id != failed.id, 10.0, "its key is free")
        assert value(shop.visited(9)) is None
        with admin(server) as client:
            (key,) = client.keys("*digest:7:2099*")
            assert 24 * 3600_000 < client.pttl(key) <= 25 * 3600_000
            assert 100 < client.memory_usage(key) < 300
    assert [user for user, _day in work.begun] == [7, 8, 7, 9]


class Refused(Work):
    """Work that fails for some amounts, once it is told to go on."""

    def __call__(self, *args: Any) -> Any:
        super().__call__(*args)
        if args[1] < 0:
            raise ValueError("no such amount")


def test_recipe_errbacks_runs_the_callback_under_the_key_of_its_task(server: LocalServer) -> None:
    payments, refunds = Refused(), Work()
    with running("errbacks", server, pay=payments, pay_back=refunds) as shop:
        bought = shop.buy(7, -1)
        payments.at((7, -1))
        payments.go()
        refunds.at((7, "ValueError('no such amount')"))
        redlock = Redlock.from_app(shop.app)
        assert redlock.try_acquire("order:7") is None, "it runs under no lock"
        refunds.go()
        assert isinstance(value(bought), ValueError)
        wait_until(lambda: redlock.holder("order:7") is None, 10.0, "its key is free")
    assert len(refunds.begun) == 1


def test_recipe_errbacks_refunds_a_chord_once_when_all_members_have_ended(
    server: LocalServer,
) -> None:
    payments, refunds = Refused(endless=False), Work(endless=False)
    with running("errbacks", server, pay=payments, pay_back=refunds) as shop:
        shop.buy_all(7, [50, -1, 20])
        wait_until(lambda: refunds.begun, 20.0, "it is refunded")
        assert sorted(payments.begun) == [(7, -1), (7, 20), (7, 50)]
        ((_order, why),) = refunds.begun
        assert "no such amount" in why
        bought = shop.buy(8, 10)
        assert value(bought) is None
    assert len(refunds.begun) == 1


def test_recipe_flask_answers_409_to_a_duplicate_and_503_without_a_quorum(
    server: LocalServer,
) -> None:
    work = Work()
    with running("flask", server, {"wait=1.0": "wait=0.1"}, build=work) as shop:
        client = shop.app.test_client()
        asked = client.post("/reports/7")
        assert asked.status_code == 202
        work.at(("shop", 7))
        again = client.post("/reports/7")
        assert (again.status_code, again.json["task"]) == (409, asked.json["task"])
        held = client.delete("/reports/7")
        assert held.status_code == 409 and "host" not in held.text and held.headers["Retry-After"]
        assert client.delete("/reports/8").status_code == 200
        work.go()
        assert value(shop.rebuild.AsyncResult(asked.json["task"])) == 7
        assert client.get(f"/tasks/{asked.json['task']}").json == {"state": "SUCCESS"}
        wait_until(lambda: client.delete("/reports/7").status_code == 200, 10.0, "it is free")
        server.pause()
        try:
            assert client.delete("/reports/7").status_code == 503
        finally:
            server.resume()


def test_recipe_sqs_locks_its_task_with_another_broker(server: LocalServer) -> None:
    payments = Work()
    changes = {'broker="sqs://"': 'broker="redis://localhost"'}
    with running("sqs", server, changes, pay=payments) as shop:
        charges = [shop.charge.delay(7, amount) for amount in (50, 20)]
        wait_until(lambda: payments.now, 10.0, "one is at work")
        wait_until(lambda: queued(server) == 0, 10.0, "the worker has both")
        assert len(payments.begun) == 1
        payments.go()
        assert [value(charge) for charge in charges] == [None, None]
