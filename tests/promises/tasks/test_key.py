"""Equal calls have one key: by position or by name, before and after the broker, dict or model."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import json
import math
import re
import sys
import time
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable

import pytest
from kombu import serialization

from celery_redlock import SingletonTask, locked
from celery_redlock.keys.canonical import CannotKey, text_of
from celery_redlock.keys.resolver import keys_of
from celery_redlock.protocol.errors import ConfigurationError
from tests.support.folding import key_of

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
UTC = datetime.timezone.utc
PLUS_ONE = datetime.timezone(datetime.timedelta(hours=1))


class Color(enum.Enum):
    RED = 1
    BLUE = "BLUE"


class Word(str, enum.Enum):
    HI = "hi"
    ODD = "a:b"


class Level(enum.IntEnum):
    LOW = 3


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Text(str):
    def __str__(self) -> str:
        return "not the text"


@dataclasses.dataclass
class Point:
    x: int
    y: typing.Any = 0
    cache: typing.Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass
class Place:
    x: int
    y: typing.Any = 0


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __json__(self) -> object:
        return {"cents": self.cents}


class Row(list[object]):
    """JSON writes a list as a list and never asks for this."""

    def __json__(self) -> object:
        raise AssertionError("kombu does not call it")


Pair = collections.namedtuple("Pair", "a b")


class LookAlike:
    """Walks and quacks like a pydantic model, for where pydantic is not installed."""

    model_fields: typing.ClassVar = {"id": None, "lang": None}

    def __init__(self, id: int, lang: str = "en") -> None:
        self.id, self.lang = id, lang

    @classmethod
    def model_validate(cls, value: dict[str, typing.Any]) -> LookAlike:
        return cls(**value)


def rebuild(report_id: object, lang: object = "en") -> None: ...


def one(a: object) -> None: ...


def two(a: object, b: object) -> None: ...


def through(serializer: str, value: object) -> object:
    kind, encoding, body = serialization.dumps(value, serializer=serializer)
    return serialization.loads(body, kind, encoding, accept=[kind])


# -- whole-argument keys --------------------------------------------------------------------------


def test_key_without_a_template_is_the_task_and_all_its_arguments() -> None:
    key = key_of("app.tasks.rebuild", rebuild)
    assert key((7,), {}) == "app.tasks.rebuild(report_id=7,lang=en)"
    assert key(("a:b",), {"lang": None}) == 'app.tasks.rebuild(report_id="a:b",lang=null)'


def positional_only(a: object, /, b: object = 2) -> None: ...


def variadic(a: object, *rest: object, **others: object) -> None: ...


def keyword_only(a: object, *, b: object = 2) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (positional_only, (1,), {}, "t(a=1,b=2)"),
        (positional_only, (1,), {"b": 2}, "t(a=1,b=2)"),
        (variadic, (1,), {}, "t(a=1,rest=[],others={})"),
        (variadic, (1, 2, 3), {"z": 1, "y": 2}, "t(a=1,rest=[2,3],others={y:2,z:1})"),
        (variadic, (), {"a": 1}, "t(a=1,rest=[],others={})"),
        (keyword_only, (1,), {}, "t(a=1,b=2)"),
        (keyword_only, (), {"b": 3, "a": 1}, "t(a=1,b=3)"),
    ],
)
def test_key_binds_every_kind_of_parameter_as_python_does(
    function: Callable[..., object], args: typing.Any, kwargs: typing.Any, expected: str
) -> None:
    assert key_of("t", function)(args, kwargs) == expected


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [(two, (1,), {}), (two, (1, 2, 3), {}), (two, (1,), {"a": 1, "b": 2}), (two, (1,), {"c": 2}),
     (two, (), {"a": 1, "c": 2}), (two, (1, 2), {"c": 2}), (rebuild, (), {"lang": "en"}),
     (rebuild, (1, 2), {"lang": "en"}), (keyword_only, (1, 2), {}),
     (positional_only, (), {"a": 1})],
)  # fmt: skip
def test_key_of_arguments_that_do_not_fit_raises_what_inspect_raises(
    function: Callable[..., object], args: typing.Any, kwargs: typing.Any
) -> None:
    with pytest.raises(TypeError) as expected:
        inspect.signature(function).bind(*args, **kwargs)
    with pytest.raises(TypeError) as raised:
        key_of("t", function)(args, kwargs)
    assert str(raised.value) == str(expected.value)


def test_key_of_a_bound_task_does_not_contain_the_task() -> None:
    def method(self: object, a: object) -> None: ...

    def starred(*args: object) -> None: ...

    assert key_of("t", method, bound=True)((1,), {}) == "t(a=1)"
    assert key_of("t", method, bound=True)((), {"a": 1}) == "t(a=1)"
    assert key_of("t", starred, bound=True)((1,), {}) == "t(args=[1])"
    with pytest.raises(ConfigurationError, match="unknown name 'self'"):
        key_of("t", method, "x:{self}", bound=True)


@pytest.mark.parametrize("function", [lambda: None, lambda *, a: None, lambda **a: None])
def test_bound_function_without_a_parameter_for_the_task_is_refused(
    function: Callable[..., object],
) -> None:
    with pytest.raises(ConfigurationError, match="first parameter"):
        key_of("t", function, bound=True)


def test_key_sees_through_wrapped_functions_methods_and_partials() -> None:
    @functools.wraps(rebuild)
    def wrapper(*args: object, **kwargs: object) -> None: ...

    class Job:
        def run(self, a: object) -> None: ...

        def __call__(self, a: object) -> None: ...

    assert key_of("t", wrapper)((7,), {}) == "t(report_id=7,lang=en)"
    assert key_of("t", Job().run)((7,), {}) == "t(a=7)"
    assert key_of("t", Job())((7,), {}) == "t(a=7)"
    assert key_of("t", functools.partial(two, 1))((7,), {}) == "t(b=7)"


def test_default_that_cannot_be_keyed_is_refused_at_declaration() -> None:
    def task(a: object, b: object = object()) -> None: ...

    with pytest.raises(ConfigurationError, match=r"default of argument 'b' of app\.task"):
        key_of("app.task", task)
    assert (
        key_of("app.task", task, "x:{a}")((1, object()), {}) == "x:1"
    )  # other arguments do not matter


# -- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "args", "expected"),
    [
        ("account:{a}", (42, 0), "account:42"),
        ("account:<a>", (42, 0), "account:42"),
        ("account:{a}", ("abc", 0), "account:abc"),
        ("account:{a}", ("42", 0), 'account:"42"'),
        ("account:{a}", (1.5, 0), "account:1.5"),
        ("account:{a}", (True, 0), "account:true"),
        ("account:{a}", ("true", 0), 'account:"true"'),
        ("account:{a}", ("", 0), 'account:""'),
        ("account:{a}", ("550e8400-e29b-41d4", 0), "account:550e8400-e29b-41d4"),
        ("account:{a}", ("x\n\x1b[31m\u202e#%", 0), 'account:"x%0A%1B[31m%E2%80%AE%23%25"'),
        ("{a}:{b}", ("a:b", "c"), '"a:b":c'),
        ("{a}:{b}", ("a", "b:c"), 'a:"b:c"'),
        ("{a}-{b}", ("a-b", "c"), "(a-b)-c"),
        ("{a}-{b}", ("a", "b-c"), "a-b-c"),
        ("{a}{b}", (1, 23), "(1)23"),
        ("{a}{b}", (12, 3), "(12)3"),
        ("{a}({b})", ("UUID", 3), "(UUID)(3)"),
        ("{{{a}}}", (1, 0), "{1}"),
        ("<<<a>>>", (1, 0), "<1>"),
        ("nightly", (1, 2), "nightly"),
        ("é#\n%:{a}", (1, 0), "%C3%A9%23%0A%25:1"),
        ("{b}/{a}/{b}", (1, 2), "2/1/2"),
    ],
)
def test_key_is_written_by_its_template(template: str, args: typing.Any, expected: str) -> None:
    assert key_of("t", two, template)(args, {}) == expected


def test_tasks_with_one_template_share_their_locks() -> None:
    assert key_of("x", one, "order:<a>")((1,), {}) == key_of("y", two, "order:{a}")((1, 2), {})


@pytest.mark.parametrize(
    ("template", "why"),
    [("", "is empty"), ("  ", "is empty"), ("x:{c}", r"unknown name 'c'; the names are: a, b"),
     ("x:<c>", r"unknown name 'c'; the names are: a, b"), ("x:{}", "inserts nothing"),
     ("x:%s", r"'%s' inserts nothing; write the name of an argument, such as \{a\}"),
     ("x:%(b)s", "inserts nothing"), ("x:%d:{a}", "inserts nothing"),
     ("x:<>", "inserts nothing"), ("x:{0}", "only the name"), ("x:{a", r"unbalanced '\{' at 2"),
     ("x:a}", r"unbalanced '\}' at 3"), ("x:<a", "unbalanced '<'"), ("x:a>", "unbalanced '>'"),
     ("x:{a>", "unbalanced"), ("x:<a}", "unbalanced"), ("x:{{a}", "unbalanced"),
     ("x:{a}}", "unbalanced"), ("x:{a{b}}", "unbalanced"),
     ("x:{a.__class__}", "without attribute"), ("x:{a[0]}", "without attribute"),
     ("x:<a.b>", "without attribute"), ("x:{a!r}", "conversion"), ("x:{a:>10}", "unbalanced"),
     ("x:{a:03}", "format"), ("x:{ a }", "only the name")],
)  # fmt: skip
def test_invalid_template_of_a_key_is_refused_at_declaration(
    template: typing.Any, why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why) as raised:
        key_of("t", two, template)
    assert isinstance(raised.value, ValueError)


def test_refused_template_names_its_task_and_offers_a_function_that_works() -> None:
    def pay(order: object, amount: int) -> None: ...

    with pytest.raises(ConfigurationError) as caught:
        keys_of("shop.pay", pay, "order:<order.id>:{amount}")
    assert str(caught.value).startswith("shop.pay: lock key template 'order:<order.id>:{amount}': ")
    offered = str(caught.value).partition("key=")[2]
    function = eval(offered)
    assert keys_of("shop.pay", pay, function)((types.SimpleNamespace(id=7), 5), {}) == (
        "order:7:5",
    )


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("order:order_id", "order:<order_id>"),
        ("order:$order_id", "order:<order_id>"),
        ("order:${order_id}", None),  # its placeholder is one of ours
        ("order:[order_id]", "order:<order_id>"),
        ("order:(order_id)", "order:<order_id>"),
        ("order:%order_id", "order:<order_id>"),
        ("order::order_id", "order::<order_id>"),
        ("order:{{order_id}}", "order:<order_id>"),
        ("order:{{ order_id }}", "order:<order_id>"),
        ("order_id:all", "<order_id>:all"),
        ("order_id-amount", "<order_id>-<amount>"),
        ("order:order_ids", None),
        ("order:my_order_id", None),
        ("orders", None),
    ],
)
def test_template_with_an_argument_only_in_its_text_is_refused_with_the_one_to_write(
    app: typing.Any, template: str, written: str | None
) -> None:
    def charge(order_id: int, amount: int) -> None: ...

    based = functools.partial(app.task, base=SingletonTask, lazy=False, shared=False)
    app.conf.task_annotations = {"annotated": {"lock_key": template}}
    for declare in (
        locked(template),
        locked("all", template),
        locked("account:<amount>", template),
        based(name="based", lock_key=template),
        based(name="annotated"),
    ):
        if written is None:
            declare(charge)
            continue
        with pytest.raises(ConfigurationError, match="one key for all calls") as caught:
            declare(charge)
        assert f"write '{written}' for its value" in str(caught.value)
        locked(written)(charge)
        offered = str(caught.value).removesuffix(" (from task_annotations)").partition("key=")[2]
        assert {eval(offered)(order, amount=5) for order in (7, 8)} == {
            template.replace("{{", "{").replace("}}", "}")
        }


def test_template_with_self_in_its_text_is_accepted_for_a_bound_task(app: typing.Any) -> None:
    @app.task(bind=True, name="t", lazy=False, shared=False)
    @locked("self-check")
    def check(self: object) -> None: ...

    assert check.run.__redlock__.resources(check, check.run, (), {}) == ("self-check",)


def test_template_names_star_arguments_as_a_list_and_a_dict() -> None:
    key = key_of("t", variadic, "x{{:{rest}/<others>")
    assert key((1, 2), {"z": 3}) == "x{:[2]/{z:3}"


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (-1, "-1"),
        (1.0, "1.0"),
        (-0.0, "0.0"),
        (1e300, "1e+300"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (None, "null"),
        (True, "true"),
        ("1e5", '"1e5"'),
        ("-inf", '"-inf"'),
        ("\ud800", '"%ED%A0%80"'),
        (b"a\xff(", "bytes(a%FF%28)"),
        (uuid.UUID(int=1), "UUID(00000000-0000-0000-0000-000000000001)"),
        (datetime.date(2024, 1, 2), "date(2024-01-02)"),
        (datetime.time(1, 2, tzinfo=PLUS_ONE), "time(01:02:00+01:00)"),
        (datetime.datetime(2024, 1, 2), "datetime(2024-01-02T00:00:00)"),
        (datetime.datetime(2024, 1, 2, tzinfo=BERLIN), "datetime(2024-01-01T23:00:00+00:00)"),
        (datetime.datetime(1, 1, 1, tzinfo=PLUS_ONE), "datetime(0001-01-01T00:00:00+01:00)"),
        (decimal.Decimal("10.50"), "Decimal(10.5)"),
        (decimal.Decimal("100"), "Decimal(100)"),
        (decimal.Decimal("-0.00"), "Decimal(0)"),
        (decimal.Decimal("1E+400"), "Decimal(1E+400)"),
        (decimal.Decimal("sNaN"), "Decimal(sNaN)"),
        (decimal.Decimal("1." + "1" * 40 + "0"), "Decimal(1." + "1" * 40 + ")"),
        (Color.RED, f"{__name__}.Color(RED)"),
        (Access.READ | Access.WRITE, f"{__name__}.Access(3)"),
        (Point(1, [2]), f"{__name__}.Point(x=1,y=[2])"),
        ({3, 1, 2}, "set(1,2,3)"),
        ({9, 10, "z"}, "set(10,9,z)"),
        ([], "[]"),
        ({"b": 1, "a": {2}, 1: "x"}, '{"1":x,a:set(2),b:1}'),
        (LookAlike(1), f"{__name__}.LookAlike(id=1,lang=en)"),
    ],
)
def test_value_of_each_type_has_its_text_in_a_key(value: object, text: str) -> None:
    assert text_of(value) == text


ONE_KEY = [
    ((1, (2, 3)), [1, [2, 3]]),
    (Pair(1, 2), [1, 2]),
    ({1: 2}, {"1": 2}),
    ({None: 1, True: 2, 1.5: 3, math.nan: 4}, {"null": 1, "true": 2, "1.5": 3, "NaN": 4}),
    ({1: "a", "1": "b"}, {"1": "b"}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (collections.OrderedDict(a=1), {"a": 1}),
    (Word.HI, "hi"),
    (Word.ODD, "a:b"),
    (Text("abc"), "abc"),
    ({Word.HI: 1, Level.LOW: 2}, {"hi": 1, "3": 2}),
    (Level.LOW, 3),
    (Money(5), {"cents": 5}),
    ("\ud83d\ude00", "\U0001f600"),
    (0.0, -0.0),
    ({1, 2}, frozenset([2, 1])),
    (b"x", bytearray(b"x")),
    (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (
        datetime.datetime(2024, 7, 1, 12, tzinfo=BERLIN),
        datetime.datetime(2024, 7, 1, 10, tzinfo=UTC),
    ),
    (Point(1, cache=object()), Point(1)),
]


@pytest.mark.parametrize(("a", "b"), ONE_KEY)
def test_equal_values_of_different_types_are_one_key(a: object, b: object) -> None:
    assert text_of(a) == text_of(b)
    assert key_of("t", one)((a,), {}) == key_of("t", one, None)((), {"a": b})


DIFFERENT = [
    *(1, 1.0, True, "1", "1.0", "True", "true", b"1", None, "null", "None", 0, False, "", b""),
    *([], {}, set(), "[]", "{}", "set()", [1], [[1]], {1}, {"1": 1}, {"1": "1"}, ["1"]),
    *(math.nan, "nan", "NaN", math.inf, "inf", -math.inf, "-inf", 10**400, 1e100, 10**100),
    *(decimal.Decimal(1), decimal.Decimal("0.1"), 0.1, "0.1", "Decimal(1)"),
    *(uuid.UUID(int=1), str(uuid.UUID(int=1)), uuid.UUID(int=1).hex, f"UUID({uuid.UUID(int=1)})"),
    *(datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1), "2024-01-01"),
    *(datetime.datetime(2024, 1, 1, tzinfo=UTC), datetime.time(0), datetime.time(0, tzinfo=UTC)),
    *(Color.RED, Color.BLUE, "BLUE", "RED", f"{__name__}.Color(RED)", Access.READ, Access(0)),
    *(Point(1), Place(1), Point(1, "0"), {"x": 1, "y": 0}, LookAlike(1), {"id": 1, "lang": "en"}),
    *("a,b", ["a", "b"], ["a,b"], "\ud800", "\udc00", "\ufffd", "%ED%A0%80", "é", "e\u0301"),
    *(" ", "\n", "\x00", "\u202e", "a b", "a  b", "#", '"', '""', "%", "%25", "(1)", "a.b", "a_b"),
]


def test_different_values_are_different_keys() -> None:
    texts = [text_of(value) for value in DIFFERENT]
    assert [text for text, n in collections.Counter(texts).items() if n > 1] == []


SURVIVE_JSON = [
    *(None, True, 7, 1.0, -0.0, math.nan, math.inf, 10**400, "a", "42", "é\u202e", "\ud800"),
    *("\ud83d\ude00", b"utf8", b"\xff\x00", uuid.UUID(int=7), decimal.Decimal("1.10")),
    *(decimal.Decimal("NaN"), decimal.Decimal("1E+9"), datetime.date(2024, 1, 1)),
    datetime.datetime(2024, 10, 27, 2, 30, fold=1),
    datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
    datetime.datetime(1890, 1, 1, tzinfo=BERLIN),
    *(datetime.time(1, tzinfo=BERLIN), datetime.time(1, 2, 3, 4, tzinfo=PLUS_ONE)),
    *((1, (2, [3])), {1: 2, None: (3,), 10**400: {}}, {"z": 1, "a": 2}, Pair(1, 2), Row([1])),
    *(Word.ODD, Level.LOW, {Word.HI: Level.LOW}, Money(3), [Money(1)], Text("x y")),
]
SURVIVE_PICKLE = [
    *SURVIVE_JSON,
    *(Color.RED, Access.READ | Access.WRITE, {3, "a", None}, frozenset([(1, 2)]), bytearray(b"x")),
    *(Point(1, {2}), {(1, 2): 3, uuid.UUID(int=1): 4, datetime.date(2024, 1, 1): 5}),
    *({Color.RED: Point(1, Place(2))}, LookAlike(1), 10**5000),
]
SURVIVE = {"json": SURVIVE_JSON, "pickle": SURVIVE_PICKLE}


@pytest.mark.parametrize(
    ("serializer", "value"),
    [(serializer, value) for serializer, values in SURVIVE.items() for value in values],
    ids=lambda value: type(value).__name__,
)
def test_key_is_the_same_before_and_after_each_serializer(serializer: str, value: object) -> None:
    args, kwargs = typing.cast(typing.Any, through(serializer, [[value], {"b": {"deep": [value]}}]))
    assert key_of("t", two)(args, kwargs) == key_of("t", two)((value, {"deep": [value]}), {})


def test_integer_of_any_size_has_a_key() -> None:
    huge = 10**5000
    assert text_of({huge: huge}) != text_of({huge: huge + 1}) != text_of({huge + 1: huge + 1})
    assert len(key_of("t", one)((huge,), {})) == 200


@pytest.mark.parametrize(
    "value",
    [
        *(sys.stderr, lambda: None, object(), object, one, iter([]), fractions.Fraction(1, 2)),
        [{"x": (lambda: None,)}],
        {object()},
        {object(): 1},
        types.MappingProxyType({}),
        Place(1, object),
    ],
    ids=lambda value: type(value).__name__,
)
def test_argument_that_cannot_be_keyed_is_refused_by_its_name(value: object) -> None:
    for key in (key_of("app.two", two), key_of("app.two", two, "x:{b}")):
        with pytest.raises(
            ConfigurationError, match=r"argument 'b' of app\.two holds a .*lock_key"
        ):
            key((1, value), {})
    with pytest.raises(CannotKey, match="no stable text"):
        text_of(value)


def test_megabyte_of_values_has_a_key() -> None:
    value = [0] * 500_000
    assert len(json.dumps(value, separators=(",", ":"))) > 1_000_000
    assert len(key_of("t", one)((value,), {})) == 200


@pytest.mark.parametrize("item", [[[[[[0]]]]], {"a": 1}, {"b": {"c": [None]}}, 0])
def test_ten_megabytes_of_values_are_refused_before_a_key_is_made(item: object) -> None:
    value, begun = [item] * (10_000_000 // len(json.dumps(item) + ",")), time.process_time()
    for given in (value, {"deep": (value,)}):
        with pytest.raises(
            ConfigurationError, match=r"'b' of app\.two holds more than 500000 .*lock_"
        ):
            key_of("app.two", two)((1, given), {})
    assert time.process_time() < begun + 2.0  # to make the key takes 4 to 18 s


def test_refusal_of_an_argument_names_its_type_and_never_its_value() -> None:
    class Secret:
        def __repr__(self) -> str:
            return "hunter2"

    with pytest.raises(ConfigurationError, match=r"test_key.*Secret") as raised:
        key_of("t", one)(({"password": Secret()},), {})
    assert "hunter2" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_value_that_contains_itself_is_refused_as_a_key() -> None:
    loop: list[object] = []
    loop += [loop, loop]
    ring: dict[str, object] = {}
    ring["ring"] = [ring]
    point = Point(1)
    point.y = point
    for value in (loop, ring, point):
        with pytest.raises(ConfigurationError, match=r"'a' of t .*contains itself"):
            key_of("t", one)((value,), {})


# -- models ---------------------------------------------------------------------------------------


def takes_model(report: LookAlike, n: int = 0) -> None: ...


def takes_optional(report: LookAlike | None = None, n: int = 0) -> None: ...


def takes_old_optional(report: typing.Optional["LookAlike"] = None, n: int = 0) -> None: ...  # noqa: UP037, UP045


@pytest.mark.parametrize("function", [takes_model, takes_optional, takes_old_optional])
@pytest.mark.parametrize("template", [None, "report:{report}"])
def test_dict_and_the_model_made_of_it_are_one_key(
    function: Callable[..., object], template: str | None
) -> None:
    key = key_of("t", function, template)
    whole = key((LookAlike(1),), {})
    assert "LookAlike(id=1,lang=en)" in whole
    assert key(({"id": 1},), {}) == whole
    assert key((), {"report": {"lang": "en", "id": 1}}) == whole
    assert key(({"id": 2},), {}) != whole


def test_dict_that_makes_no_model_stays_a_dict_in_a_key() -> None:
    assert key_of("t", takes_model, "{report}")(({"no": 1},), {}) == "{no:1}"


def test_annotations_that_hold_no_single_model_are_ignored_by_a_key() -> None:
    def task(a: Unknown, b: LookAlike | Point, c: dict[str, LookAlike], **d: LookAlike) -> None: ...  # type: ignore[name-defined] # noqa: F821

    value = {"id": 1}
    key = key_of("t", task, "{a}{b}{c}{d}")
    assert key((value, value, value), value) == "({id:1})({id:1})({id:1}){id:1}"


def test_model_defined_after_the_task_is_found_at_the_first_call() -> None:
    def task(report: Late = {"id": 1}) -> None: ...  # type: ignore[name-defined] # noqa: B006, F821

    key = key_of("t", task)
    globals()["Late"] = LookAlike
    try:
        assert key((), {}) == key(({"id": 1},), {}) == key((LookAlike(1),), {})
    finally:
        del globals()["Late"]


def test_pydantic_models_have_one_key_before_and_after_celery_validates_them() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Line(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        sku: str
        count: int = 1

    class Order(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        model_config = pydantic.ConfigDict(extra="allow")
        id: uuid.UUID
        when: datetime.datetime
        lines: tuple[Line, ...] = ()
        tags: frozenset[str] = frozenset()

        @functools.cached_property
        def slow(self) -> object:
            return object()

    def task(order: object, note: str = "") -> None: ...

    task.__annotations__["order"] = typing.Optional[Order]  # noqa: UP045
    key = key_of("t", task)
    sent = {
        "id": str(uuid.UUID(int=1)),
        "when": "2024-01-01T00:00:00Z",
        "lines": [{"sku": "a"}],
        "zeta": 1,
        "alpha": [2],
    }
    model = Order.model_validate(sent)
    assert model.slow is model.slow  # a cached property adds to the model's __dict__
    whole = key((model,), {})
    assert key((sent,), {}) == whole
    assert key((dict(reversed(sent.items())),), {}) == whole
    assert key((model.model_dump(),), {}) == whole
    assert key((through("json", model.model_dump(mode="json")),), {}) == whole
    assert key((Order.model_validate({**sent, "zeta": 2}),), {}) != whole
    assert key((Order.model_validate({**sent, "lines": []}),), {}) != whole


# -- length ---------------------------------------------------------------------------------------


def test_long_key_is_a_readable_head_and_a_digest_of_the_whole() -> None:
    key = key_of("app.tasks.rebuild", rebuild)
    long = key(("x" * 500,), {})
    assert len(long) == 200
    assert re.fullmatch(r"app\.tasks\.rebuild\(report_id=x+#[0-9a-f]{32}", long)
    assert len({long, key(("x" * 501,), {}), key(("x" * 500,), {"lang": "de"})}) == 3
    # It does not change from release to release.
    assert key_of("t", one)(("x" * 500,), {})[-32:] == "f424a3199081ea202dfd189eed22d43c"


def test_key_is_digested_from_the_201st_byte_on_and_equals_no_short_one() -> None:
    key = key_of("t", one, "{a}")
    assert key(("x" * 200,), {}) == "x" * 200
    digested = key(("x" * 201,), {})
    assert "#" in digested and key((digested,), {}) != digested
    assert key_of("t", one, "#" * 3)((1,), {}) == "%23%23%23"
