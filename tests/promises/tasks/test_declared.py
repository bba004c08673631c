"""Options of a lock that nothing would read, and two locks on one task, are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, shared_task

from celery_redlock import ConfigurationError, SingletonTask, locked
from celery_redlock.config.settings import unread
from celery_redlock.config.task_lock import lock_of
from celery_redlock.doctor.tasks import examine_tasks
from celery_redlock.worker import startup
from celery_redlock.worker.startup import check
from tests.support.names import Log


def charge(order_id: int) -> None: ...


def declare(app: Any, function: Any = charge, **options: Any) -> Any:
    return app.task(name="shop.charge", shared=False, **options)(function)


@pytest.mark.parametrize(
    ("ttl", "said"),
    [
        (30, ""),
        (900, ""),
        (3000, "a ttl of 3000 s keeps the lock of a dead worker for 50 minutes"),
        (30_000, "do you mean 30?"),
    ],
)
@pytest.mark.parametrize("way", ["locked", "based"])
def test_ttl_that_looks_like_milliseconds_is_a_warning(
    app: Any, caplog: Log, ttl: float, said: str, way: str
) -> None:
    if way == "locked":
        task = declare(app, locked("a:<order_id>", ttl=ttl)(charge))
    else:
        task = declare(app, base=SingletonTask, lock_ttl=ttl)
    app.finalize()
    logged = [record.getMessage() for record in caplog.records]
    for lines in (logged, list(startup._likely_milliseconds([task]))):
        assert len(lines) == bool(said)
        assert all(line.startswith("shop.charge: ") and said in line for line in lines)


def refused(app: Any, *words: str) -> None:
    """Finalizing the app ends with it, the doctor says it, and a worker does not start."""
    with pytest.raises(ConfigurationError) as caught:
        app.finalize()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert found(app) == [str(caught.value)]


def warned(app: Any, caplog: Log, *words: str) -> None:
    """Finalizing the app, a worker and the doctor warn alike."""
    app.finalize()
    (logged,) = [record.getMessage() for record in caplog.records]
    assert all(word in logged for word in words), logged
    check(SimpleNamespace(app=app, hostname="here"))
    caplog.clear()
    startup.announce(SimpleNamespace(app=app))
    assert [record.getMessage() for record in caplog.records][-1:] == [logged]
    findings = [one for one in examine_tasks(app) if one.check == "configuration"]
    assert [(one.level, one.what) for one in findings] == [("warning", logged)]


def found(app: Any) -> list[str]:
    """Return the findings of the doctor for an app with which no worker starts."""
    with pytest.raises(SystemExit):
        check(SimpleNamespace(app=app, hostname="here"))
    return [finding.what for finding in examine_tasks(app) if finding.check == "configuration"]


@pytest.mark.parametrize(
    "options",
    [
        *({"lock_key": "order:<order_id>"}, {"lock_on_conflict": print}, {"lock_ttl": 5}),
        *({"lock_on_conflict": "skip"}, {"redlock_ttl": 5}),
        *({"lock_tll": 5}, {"lock_onconflict": "skip"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["then finalized", "finalized before", "shared", "a class"])
def test_option_on_a_task_without_a_lock_is_a_warning(
    app: Any, caplog: Log, options: dict[str, Any], how: str
) -> None:
    """The option may belong to another lock: importing ours must not stop that worker."""
    if how == "finalized before":
        app.finalize()
    if how == "shared":
        shared_task(name="shop.charge", **options)(charge)
    elif how == "a class":
        kind = type("Charge", (Task,), {"name": "shop.charge", "run": charge, **options})
        app.register_task(kind())
    else:
        declare(app, **options)
    warned(app, caplog, "shop.charge", next(iter(options)), "base=SingletonTask", "@locked(")


@pytest.mark.parametrize("under", [False, True])
def test_option_of_a_task_beside_locked_is_refused(app: Any, under: bool) -> None:
    lock = locked("order:<order_id>")
    if under:
        declare(app, lock(charge), lock_ttl=5)
    else:
        lock(declare(app, lock_ttl=5))
    refused(app, "shop.charge", "lock_ttl", "@locked(..., ttl=...)")


class Annotations:
    """By a class, of one task."""

    def __repr__(self) -> str:  # names a test
        return "by a class"

    def annotate(self, task: Any) -> dict[str, Any] | None:
        return {"lock_ttl": 5} if task.name == "shop.charge" else None


BY_NAME = [
    {"shop.charge": {"lock_ttl": 5}},
    [{"shop.other": {"rate_limit": "1/s"}}, {"shop.charge": {"lock_ttl": 5}}],
    Annotations(),
    [{"*": {"rate_limit": "1/s"}}, Annotations()],
]
TO_ALL = [{"*": {"lock_ttl": 5}}, [{"shop.other": {}}, {"*": {"lock_ttl": 5}}]]


@pytest.mark.parametrize("annotations", [*BY_NAME, *TO_ALL], ids=str)
@pytest.mark.parametrize("how", ["under", "over", "over shared"])
def test_an_annotation_of_a_locked_task_is_refused(app: Any, annotations: Any, how: str) -> None:
    app.conf.task_annotations = annotations
    lock = locked("order:<order_id>")
    if how == "under":
        declare(app, lock(charge))
    elif how == "over":
        lock(declare(app))
    else:
        lock(shared_task(name="shop.charge")(charge))
    refused(app, "shop.charge", "lock_ttl", "@locked(..., ttl=...)")


@pytest.mark.parametrize("annotations", BY_NAME, ids=str)
def test_annotation_of_a_task_without_a_lock_is_a_warning(
    app: Any, caplog: Log, annotations: Any
) -> None:
    app.conf.task_annotations = annotations
    declare(app)
    warned(app, caplog, "shop.charge", "lock_ttl", "base=SingletonTask")


@pytest.mark.parametrize("name", ["lock_ttl", "lock_limit"])
def test_setting_named_as_an_option_of_a_task_is_a_warning(
    app: Any, caplog: Log, name: str
) -> None:
    app.config_from_object({f"CELERY_{name.upper()}": 5}, namespace="CELERY")
    app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]
    (said,) = unread(app.conf)
    assert said.startswith(f"celery_redlock does not read the setting {name}: ")
    check(SimpleNamespace(app=app, hostname="here"))
    startup.announce(SimpleNamespace(app=app))
    assert said in [record.getMessage() for record in caplog.records]
    findings = [one for one in examine_tasks(app) if one.check == "configuration"]
    assert [(one.level, one.what) for one in findings] == [("warning", said)]


@pytest.mark.parametrize("annotations", TO_ALL, ids=str)
def test_annotation_of_all_tasks_is_accepted_by_tasks_without_a_lock(
    app: Any, annotations: Any
) -> None:
    app.conf.task_annotations = annotations
    declare(app)
    one = app.task(base=SingletonTask, name="shop.one", shared=False)(charge)
    app.finalize()
    assert lock_of(app.tasks["shop.charge"]) is None
    assert one.redlock.options(app).ttl == 5.0


def test_own_attributes_that_begin_like_ours_are_ignored(app: Any) -> None:
    class Own(Task):
        abstract = True
        lock_file = "/run/shop.lock"
        lock_expires = 3600
        lockdown = locker = True
        redlock_client = None

        def lock_key(self) -> str:
            return "own"

        @property
        def lock_ttl(self) -> int:
            return 1

        @staticmethod
        def lock_wait() -> None: ...

    declare(app, base=Own, lock_id="x", ttl=5, key="y", scope="z")
    app.finalize()
    assert lock_of(app.tasks["shop.charge"]) is None


@pytest.mark.parametrize("how", ["under", "over", "over shared", "in a class"])
def test_a_singleton_task_that_is_locked_as_well_is_refused(app: Any, how: str) -> None:
    lock = locked("order:<order_id>")
    if how == "under":
        declare(app, lock(charge), base=SingletonTask)
    elif how == "over":
        lock(declare(app, base=SingletonTask))
    elif how == "over shared":
        lock(shared_task(name="shop.charge", base=SingletonTask)(charge))
    else:

        class Charge(SingletonTask):
            name = "shop.charge"

            @lock
            def run(self, order_id: int) -> None: ...

        with pytest.raises(ConfigurationError, match="is a SingletonTask and @locked"):
            app.register_task(Charge())
        assert len(found(app)) == 1
        return
    refused(app, "shop.charge is a SingletonTask and @locked", "lock_key")


def test_two_locks_on_one_function_are_refused_when_decorating(app: Any) -> None:
    once = locked("order:<order_id>")
    shared = shared_task(name="shop.shared")(once(charge))
    for target in (once(charge), declare(app, once(charge)), shared):
        with pytest.raises(ConfigurationError, match=r"is @locked twice.*'a:<x>', 'b:<y>'"):
            locked("other:<order_id>")(target)


def test_two_locks_over_one_task_are_refused(app: Any) -> None:
    locked("other:<order_id>")(locked("order:<order_id>")(declare(app)))
    with pytest.raises(ConfigurationError, match="is @locked twice"):
        app.finalize()
    assert lock_of(app.tasks["shop.charge"]) is not None  # and it does not run without


def test_function_may_be_two_tasks_with_a_lock_each(app: Any) -> None:
    declare(app, locked("order:<order_id>")(charge))
    app.task(name="shop.other", shared=False)(locked("other:<order_id>")(charge))
    app.finalize()
    assert all(lock_of(app.tasks[name]) for name in ("shop.charge", "shop.other"))


def test_lock_over_a_shared_task_is_applied_in_every_app(app: Any) -> None:
    shared = locked("order:<order_id>", ttl=7)(shared_task(name="shop.charge")(charge))
    other = Celery("other", broker="memory://", set_as_current=False)
    for one in (app, other):
        one.finalize()
        lock = lock_of(one.tasks["shop.charge"])
        assert lock is not None and lock.own["ttl"] == 7.0
    other.close()
    assert shared is not None


@pytest.mark.parametrize("how", ["locked", "over", "base of both"])
@pytest.mark.parametrize(
    "module", ["celery_once.tasks", "celery_singleton.singleton", "celery_batches"]
)
def test_task_with_the_base_of_another_library_and_our_lock_is_refused(
    app: Any, module: str, how: str
) -> None:
    options = {"lock_expiry": None, "unique_on": None}  # celery-singleton's
    theirs = type("Theirs", (Task,), {"abstract": True, "__module__": module, **options})
    lock, library = locked("order:<order_id>"), module.partition(".")[0].replace("_", "-")
    if how == "locked":
        declare(app, lock(charge), base=theirs)
    elif how == "over":
        lock(declare(app, base=theirs))
    else:
        with pytest.raises(ConfigurationError, match=f"Theirs of {library}"):
            type("Both", (SingletonTask, theirs), {"abstract": True})
        return
    refused(app, "shop.charge has a lock of celery_redlock", f"Theirs of {library}")


def pay(order_id: int, amount: int = 1, *, fast: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("key", "outcome"),
    [
        (lambda order_id, amount, fast: f"{order_id}", "warned"),  # pay(7) fails
        (lambda order_id, *_, **__: f"{order_id}", ""),
        (lambda order_id, amount=1, fast=False: f"{order_id}", ""),
        (lambda *args, **kwargs: "all", ""),
        (lambda order_id: f"{order_id}", "warned"),  # pay(7, 2) fails
        (lambda order, *_, **__: f"{order}", "warned"),  # pay(order_id=7) fails
        (lambda: "all", "refused"),
        (lambda tenant, region, zone, world: "all", "refused"),
    ],
)
@pytest.mark.parametrize("bind", [False, True])
def test_key_function_whose_arguments_differ_from_its_tasks_is_reported(
    app: Any, caplog: Log, key: Any, outcome: str, bind: bool
) -> None:
    def bound(self: Any, order_id: int, amount: int = 1, *, fast: bool = False) -> None: ...

    body = bound if bind else pay
    words = "it is called with the arguments of the task, .*let it take what it does not need by"
    if outcome == "refused":
        with pytest.raises(ConfigurationError, match=words):
            locked(key=key)(body)
        return
    declare(app, locked(key=key)(body), bind=bind)
    app.task(name="based", shared=False, base=SingletonTask, lock_key=key, bind=bind)(body)
    app.finalize()
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == (2 if outcome else 0)
    assert all("made by " in line and "arguments of the task" in line for line in logged)
