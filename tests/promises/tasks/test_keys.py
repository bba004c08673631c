"""Valid keys: templates, names of arguments, functions, and the prefix of each."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import WorkerShutdown

from celery_redlock import ConfigurationError, SingletonTask, locked
from celery_redlock.config.task_lock import lock_of, resource_of, resources_of
from celery_redlock.keys.resolver import Templates, keys_of
from tests.support.fake_lock import FakeRedlock


def pay(src: int, dst: int, note: str = "") -> None: ...


def made(key: Any, args: tuple[object, ...] = (1, 2), **options: Any) -> tuple[str, ...]:
    return keys_of("shop.pay", pay, key, **options)(args, {})


# -- Several templates


def test_each_template_of_a_list_is_a_key() -> None:
    keys = keys_of("shop.pay", pay, ["account:<src>", "account:{dst}"])
    assert keys.several
    assert keys((1, 2), {}) == keys((), {"dst": 1, "src": 2}) == ("account:1", "account:2")
    assert keys((7, 7), {}) == ("account:7",)


def test_single_template_in_a_list_is_one_key() -> None:
    for key in ("account:<src>", ["account:<src>"], ["account:<src>"] * 2):
        assert made(key) == ("account:1",)
        assert not keys_of("shop.pay", pay, key).several


@pytest.mark.parametrize("template", ["account:<sorce>", "account:<src", "", "account:<>"])
def test_every_template_of_a_list_is_checked_at_declaration(template: str) -> None:
    with pytest.raises(ConfigurationError):

        @locked("account:<src>", template)
        def move(src: int, dst: int) -> None: ...


# -- Names of arguments


def test_argument_names_make_one_key_with_the_name_of_the_task() -> None:
    assert made(["src", "note"]) == ('shop.pay(note="",src=1)',)
    assert made(["note", "src", "note"]) == made(("src", "note"))
    assert made(["src"]) == ("shop.pay(src=1)",)
    assert not keys_of("shop.pay", pay, ["src", "note"]).several


def test_keys_of_different_argument_names_differ() -> None:
    keys = {made(key) for key in (None, ["src"], ["dst"], ["src", "dst"], ["src", "dst", "note"])}
    assert len(keys) == 5


def test_unknown_argument_name_in_a_key_is_refused_at_declaration() -> None:
    with pytest.raises(ConfigurationError, match="unknown argument 'sorce'; the names are: src, d"):
        made(["src", "sorce"])
    with pytest.raises(ConfigurationError, match=r"unknown argument 'x'.*takes no arguments"):
        keys_of("t", lambda: None, ["x"])


def test_argument_names_mixed_with_templates_and_an_empty_list_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"mixes names .*'dst'.*'account:<src>'.*'\{dst\}'"
    ):
        made(["account:<src>", "dst"])
    with pytest.raises(ConfigurationError, match="empty list"):
        made([])


@pytest.mark.parametrize("key", [["src", 3], ["src", ""], 3, {"src"}, {"src": 1}, b"src", [None]])
def test_key_of_another_type_is_refused_when_the_task_is_declared(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="key must be"):
        locked(key=key)
    with pytest.raises(ConfigurationError, match="lock_key must be"):

        class Task(SingletonTask):
            lock_key = key


def test_argument_name_without_brackets_is_refused_as_a_template() -> None:
    """The template would be one key for all calls.

    It is easily written for `<src>` or `["src"]`.
    """
    for key in ("src", Templates(("src", "dst")), Templates(("account:<src>", "dst"))):
        with pytest.raises(ConfigurationError, match=r"write '<(src|dst)>' for its value, or \['"):
            made(key)
    with pytest.raises(ConfigurationError, match="write '<src>' for its value"):
        locked("src")(pay)
    assert made("source") == ("source",)


# -- A function


def test_key_function_is_called_with_the_arguments_of_the_task() -> None:
    calls: list[object] = []

    def key(*args: object, **kwargs: object) -> str:
        calls.append((args, kwargs))
        return "order:7"

    keys = keys_of("shop.pay", pay, key)
    assert keys((1,), {"dst": 2}) == ("order:7",)
    assert calls == [((1,), {"dst": 2})]
    assert not keys.several  # as far as is known


def test_key_function_may_return_several_keys() -> None:
    assert made(lambda src, dst: [f"account:{src}", f"account:{dst}"]) == ("account:1", "account:2")
    assert made(lambda src, dst: {f"account:{src}"}) == ("account:1",)
    assert made(lambda src, dst: ["b", "a", "b"]) == ("a", "b")  # each once, in one order


def test_text_from_a_key_function_becomes_the_same_key_as_from_a_template() -> None:
    for text in (
        "x" * 500,
        "order:7",
        "a b",
        'say "x"',
        "50%",
        "é\n",
        "x#slot2",
        "y#fence",
        "#",
        "\ud800",
    ):
        template = text.replace("{", "{{")
        assert made(lambda src, dst, text=text: text) == keys_of("t", pay, template)((1, 2), {})
        (key,) = made(lambda src, dst, text=text: text)
        assert key.isascii() and key.isprintable() and len(key) <= 200
        assert ("#" in key) == (len(text) > 200)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        *((None, "NoneType"), (7, "int"), (["a", 7], "int"), (b"a", "bytes")),
        *(("", "empty"), (" ", "empty"), ([], "empty"), (["a", ""], "empty")),
    ],
)
def test_invalid_result_of_a_key_function_is_refused_with_the_name_of_the_task(
    value: object, what: str
) -> None:
    def key(*_args: object) -> Any:
        return value

    with pytest.raises(
        ConfigurationError, match=f"the lock key of shop.pay, made by .*key: .*{what}"
    ):
        made(key)


def test_error_in_a_key_function_is_raised_with_its_task_and_cause() -> None:
    def key(src: int) -> str:
        return str(1 / 0)

    with pytest.raises(ConfigurationError, match=r"shop.pay, made by .*: raised TypeError") as it:
        made(lambda *args: key(*args))
    assert isinstance(it.value.__cause__, TypeError)
    with pytest.raises(ConfigurationError, match="raised ZeroDivisionError"):
        keys_of("t", lambda src: None, key)((1,), {})
    with pytest.raises(TypeError, match="too many"):  # what the task does not take is not its fault
        made(lambda *args: "k", (1, 2, 3, 4))


def test_key_function_that_exits_has_failed_but_an_interrupted_one_has_not() -> None:
    def made_by(key: Callable[[int], object]) -> Any:
        return keys_of("t", lambda src: None, key)((1,), {})

    with pytest.raises(ConfigurationError, match="raised SystemExit"):
        made_by(sys.exit)

    def interrupted_by(handler: Callable[..., None]) -> Callable[[int], object]:
        def key(src: int) -> str:
            signal.signal(signal.SIGUSR1, handler)
            signal.raise_signal(signal.SIGUSR1)
            return "k"

        return key

    def of_billiard(signum: int, frame: object) -> None:
        signal.signal(signum, signal.SIG_DFL)
        sys.exit(-(256 - signum))

    def of_celery(signum: int, frame: object) -> None:
        raise WorkerShutdown(0)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        for handler in (of_billiard, of_celery, lambda *_: sys.exit(0)):
            with pytest.raises(SystemExit):
                made_by(interrupted_by(handler))
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(KeyboardInterrupt):
        made_by(lambda src: signal.raise_signal(signal.SIGINT))


def test_async_generator_or_method_as_key_function_is_refused_at_declaration() -> None:
    async def later(src: int, dst: int) -> str:
        return "k"

    with pytest.raises(ConfigurationError, match=r"made by .*later: is async"):
        made(later)
    with pytest.raises(ConfigurationError, match="is async, or a generator"):
        made(lambda src, dst: (yield "k"))
    with pytest.raises(ConfigurationError, match="write @staticmethod over it"):

        class Task(SingletonTask):
            def run(self, src: int) -> None: ...

            def lock_key(self, src: int) -> str:
                return "k"

    asyncio.run(later(1, 2))


def test_any_callable_may_be_a_key_function() -> None:
    class Key:
        def __call__(self, src: int, dst: int) -> str:
            return f"k:{src}"

    assert made(Key()) == ("k:1",)
    assert made(functools.partial("{2}{0}{1}".format, "k", ":")) == ("1k:",)


# -- What it begins with


def test_scope_name_replaces_the_name_of_the_task_in_a_key() -> None:
    for key in (None, ["src"]):
        (plain,), (scoped,) = made(key), made(key, scope="money")
        assert scoped == plain.replace("shop.pay(", "money(")
    assert keys_of("other", pay, None, scope="money")((1, 2), {}) == made(None, scope="money")


def test_scope_name_stands_before_templates_and_results_of_functions() -> None:
    assert made("account:<src>", scope="bank") == ("bank:account:1",)
    assert made(["a:<src>", "b:<dst>"], scope="bank") == ("bank:a:1", "bank:b:2")
    assert made(lambda src, dst: ["a:1", "b"], scope="bank") == ("bank:a:1", "bank:b")
    assert made("account:<src>", scope="<b>{c}#%") == made("<<b>>{{c}}#%:account:<src>")


@pytest.mark.parametrize("scope", ["", 3, ["x"], b"x"])
def test_scope_name_that_is_no_text_is_refused(scope: object) -> None:
    with pytest.raises(ConfigurationError, match="scope_name must be a string"):
        locked(scope_name=scope)


# -- On tasks


def test_task_class_declares_its_keys_in_every_form(app: Celery) -> None:
    class Money(SingletonTask):
        abstract = True
        lock_key = ("account:<src>", "account:<dst>")
        lock_scope_name = "bank"

    class Whole(Money):
        abstract = True
        lock_key = None

    class Function(SingletonTask):
        abstract = True

        @staticmethod
        def lock_key(src: int, dst: int) -> str:
            return f"a:{src}"

    def task(base: type[Any], **options: Any) -> Any:
        def run(src: int, dst: int) -> None: ...

        return app.task(shared=False, base=base, name=f"t{len(app.tasks)}", **options)(run)

    one, other = task(Money), task(Money, lock_key=["src"])
    assert resources_of(one, (1, 2), {}) == ("bank:account:1", "bank:account:2")
    assert resource_of(one, (1, 2), {}) == "bank:account:1 + bank:account:2"
    assert resources_of(other, (1, 2), {}) == ("bank(src=1)",)
    assert resources_of(task(Whole), (1, 2), {}) == ("bank(src=1,dst=2)",)
    assert resources_of(task(Function), (1, 2), {}) == ("a:1",)
    lambdas = task(SingletonTask, lock_key=lambda src, dst: f"b:{dst}")
    assert resources_of(lambdas, (1, 2), {}) == ("b:2",)
    plain = app.task(shared=False, name="plain")(pay)
    assert resources_of(plain, (1, 2), {}) == () and resource_of(plain, (1, 2), {}) is None


def test_bound_task_is_no_argument_of_its_key(app: Celery) -> None:
    @app.task(
        bind=True,
        shared=False,
        base=SingletonTask,
        lock_key=lambda src, dst: [f"k:{src}", f"k:{dst}"],
    )
    def move(self: Any, src: int, dst: int) -> None: ...

    @app.task(bind=True, shared=False)
    @locked(["dst"], scope_name="moves")
    def moved(self: Any, src: int, dst: int) -> None: ...

    assert resources_of(move, (1, 2), {}) == ("k:1", "k:2")
    lock = lock_of(moved)
    assert lock is not None
    assert lock.resources(moved, moved.run, (1, 2), {}) == ("moves(dst=2)",)


def test_several_keys_with_a_fencing_token_are_refused(app: Celery) -> None:
    with pytest.raises(ConfigurationError, match="this task locks several"):

        @locked("account:<src>", "account:<dst>", fencing=True)
        def move(src: int, dst: int) -> None: ...

    with pytest.raises(ConfigurationError, match="this task locks several"):

        class Task(SingletonTask):
            lock_key = ("account:<src>", "account:<dst>")
            lock_fencing = True

            def run(self, src: int, dst: int) -> None: ...

    locked("account:<src>", limit=2)(pay)
    with pytest.raises(ConfigurationError, match="limit lets several work at a time"):
        locked("account:<src>", limit=2, fencing=True)


def test_fencing_for_all_tasks_is_refused_if_one_has_several_keys(app: Celery) -> None:
    app.conf.redlock_fencing = True

    @app.task(shared=False)
    @locked("account:<src>", "account:<dst>")
    def move(src: int, dst: int) -> None: ...

    @app.task(shared=False)
    @locked("account:<src>", limit=2)
    def limited(src: int) -> None: ...

    @app.task(shared=False)
    @locked("account:<src>", "account:<dst>", fencing=False)
    def unfenced(src: int, dst: int) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"Give it fencing=False \(redlock_fencing sets it"
    ):
        lock_of(move).options(app)  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="limit lets several work"):
        lock_of(limited).options(app)  # type: ignore[union-attr]
    assert not lock_of(unfenced).options(app).fencing  # type: ignore[union-attr]


def test_plain_function_with_several_keys_is_locked_under_all_of_them(
    redlock: FakeRedlock, app: Celery
) -> None:
    @app.task(shared=False)
    @locked("account:<src>", "account:<dst>")
    def move(src: int, dst: int) -> set[object]:
        return redlock.tokens("account:1") | redlock.tokens("account:2")

    assert len(move(2, 1)) == 1 and None not in move(2, 1)
    assert redlock.free("account:1") and redlock.free("account:2")


def test_key_function_of_a_fenced_task_may_not_return_several_keys(
    redlock: FakeRedlock, app: Celery
) -> None:
    @app.task(shared=False)
    @locked(key=lambda src, dst: [f"a:{src}", f"a:{dst}"], fencing=True)
    def move(src: int, dst: int) -> str:
        return "moved"

    with pytest.raises(ConfigurationError, match="a fencing token is of one resource"):
        move(1, 2)
    assert move(1, 1) == "moved"


def test_limit_of_a_plain_function_admits_that_many_calls(
    redlock: FakeRedlock, app: Celery
) -> None:
    @app.task(shared=False)
    @locked("pool", limit=2, wait=0.0)
    def work() -> list[str]:
        return [holder.resource for holder in redlock.holders("pool", limit=2)]

    with redlock.lock("other"):
        assert work() == ["pool"]
    theirs = [redlock.acquire("pool", limit=2) for _ in range(2)]
    with pytest.raises(Exception, match="all of its 2 holders"):
        work()
    redlock.release(theirs[0])
    assert work() == ["pool", "pool"]
