"""A survey of real nodes finds all our keys, and survives whatever others put there."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from celery_redlock import ConfigurationError, QuorumUnavailable, Redlock
from celery_redlock.protocol.names import mark_of, matching
from celery_redlock.protocol.replies import DONE
from celery_redlock.protocol.values import Owner, token_digest
from celery_redlock.stores.redis.reader import RedisReader as Reader
from celery_redlock.survey.reader import read_nodes
from celery_redlock.survey.snapshot import KINDS, Entry, look, look_for, survey
from tests.support.names import Patch, Servers
from tests.support.nodes import TOKEN, told_all
from tests.support.wait import wait_until

OWNER = Owner("web-1", 4242, "0123-abcd", task="shop.charge")
MARK = mark_of(OWNER, ["order:1"])
TOKENS = [OWNER.token(f"{number:032x}", 1.7e9) for number in range(3)]


@pytest.fixture
def redlock(servers: Servers) -> Iterator[Redlock]:
    lock = Redlock([server.url for server in servers], ttl=20)
    lock.client.driver.connect(30.0, rest=30.0)  # a lock is not written to a node that comes later
    yield lock
    lock.close()


@pytest.fixture
def clients(admins: list[redis.Redis]) -> list[redis.Redis]:
    return admins


def put(clients: list[redis.Redis], key: str | bytes, value: str = TOKENS[0]) -> None:
    for client in clients:
        client.set(key, value, px=60_000)


def found(redlock: Redlock, match: str = "*", *kinds: str) -> list[Entry]:
    return list(survey(redlock, match, kinds=kinds or KINDS, timeout=20).entries)


def test_survey_shows_a_lock_with_its_owner_and_its_ttl_on_each_node(redlock: Redlock) -> None:
    with redlock.lock("order:1", owner=OWNER, fencing=True) as lease:
        told_all(redlock)
        (entry,) = survey(redlock).entries
        assert (entry.resource, entry.key, entry.kind) == ("order:1", "redlock:order:1", "lock")
        assert entry.owner == OWNER and entry.fence == lease.fencing_token
        assert entry.held and (entry.nodes, entry.total, entry.quorum) == (5, 5, 3)
        assert all(left is not None and 0 < left <= 20 for left in entry.ttls)
        assert entry.held_for is not None and entry.held_for >= 0
        assert entry.slot == 1 and not entry.split and not entry.leaked
    assert survey(redlock).entries == ()


def test_survey_shows_each_kind_of_key_as_such(
    redlock: Redlock, clients: list[redis.Redis]
) -> None:
    put(clients, "redlock:a#reserved")
    beat = Owner("web-1", 4243, stamp="0.500").token("0" * 32, 1.7e9)
    put(clients, "redlock:beat:app:entry:every-5s", beat)
    put(clients, "redlock:beat:mine")
    put(clients, "redlock:" + MARK, DONE)
    put(clients, "redlock:a#fence", "17")
    put(clients, "redlock:a#start#slot2")
    put(clients, "redlock:b", "somebody else's")
    put(clients, "redlock:nonce:" + "0" * 32, "1")
    put(clients, "elsewhere", "x")
    for client in clients:
        client.zadd("redlock:a#line", {"redlock:#line:ff:1": 1.7e15})
    assert [(e.resource, e.kind) for e in found(redlock)] == [
        (MARK.removesuffix("#done"), "mark"),
        ("a", "start"),
        ("a", "reservation"),
        ("a", "fence"),
        ("a", "line"),
        ("b", "foreign"),
        ("beat:app:entry:every-5s", "tick"),
        ("beat:mine", "lock"),
    ]
    for kind in KINDS:
        assert {e.kind for e in found(redlock, "*", kind)} == {kind}, kind
    assert [e.kind for e in survey(redlock).entries] == ["reservation", "lock"]
    with pytest.raises(ValueError, match="locks"):
        survey(redlock, kinds=["locks"])


def test_survey_shows_the_largest_fencing_number(
    redlock: Redlock, clients: list[redis.Redis]
) -> None:
    for number, client in enumerate(clients[:4]):
        client.set("redlock:a#fence", 17 + number, px=60_000)
    (entry,) = found(redlock)
    assert (entry.kind, entry.fence, entry.nodes, entry.rivals) == ("fence", 20, 4, ())


def test_survey_shows_the_token_of_most_nodes_and_the_others_as_rivals(
    redlock: Redlock, clients: list[redis.Redis]
) -> None:
    for client, number in zip(clients, (0, 1, 1, 2), strict=False):
        put([client], "redlock:order:1", TOKENS[number])
    seen = survey(redlock)
    (entry,) = seen.entries
    assert entry.digest == token_digest(TOKENS[1])
    assert entry.nodes == 2 and not entry.held and entry.split
    assert [left is None for left in entry.ttls] == [True, False, False, True, True]
    assert {rival.digest for rival in entry.rivals} == {*map(token_digest, TOKENS[::2])}
    assert not TOKEN.search(repr(seen)) and not TOKEN.search(str(entry.data()))
    put(clients[3:4], "redlock:order:1", TOKENS[1])
    (entry,) = survey(redlock).entries
    assert entry.held and not entry.split and len(entry.rivals) == 1


def test_survey_shows_a_key_without_a_ttl_as_a_leak(
    redlock: Redlock, clients: list[redis.Redis]
) -> None:
    clients[2].set("redlock:order:1", TOKENS[0])
    (entry,) = survey(redlock).entries
    assert entry.ttls == (None, None, math.inf, None, None) and entry.leaked
    assert entry.data()["ttls"] == [None, None, -1.0, None, None]


@pytest.mark.parametrize(
    "put",
    [
        lambda client: client.hset("redlock:order:1", "a", "b"),
        lambda client: client.set("redlock:order:1", Owner("h" * 5000, 1).token("0" * 32)),
        lambda client: client.set("redlock:order:1", ""),
        lambda client: client.set("redlock:order:1", b"\xff|\xfe|1"),
        lambda client: client.set("redlock:order:1#fence", "no number"),
        lambda client: client.set("redlock:order:1#line", "no line"),
        lambda client: client.zadd("redlock:order:1#done", {"a": 1}),
        lambda client: client.zadd("redlock:order:1#reserved", {"a": math.inf}),
    ],
    ids=["hash", "long", "empty", "bytes", "fence", "line", "mark", "reservation"],
)
def test_survey_shows_keys_of_other_programs_as_foreign(
    redlock: Redlock, clients: list[redis.Redis], put: object
) -> None:
    for client in clients:
        put(client)  # type: ignore[operator]
    (entry,) = found(redlock)
    assert (entry.resource, entry.kind, entry.owner) == ("order:1", "foreign", None)
    assert [e.kind for e in look(redlock, "order:1", 20)] == ["foreign"]
    assert found(redlock, "*", "foreign") == [entry]


def test_survey_counts_a_queue_of_nonsense(redlock: Redlock, clients: list[redis.Redis]) -> None:
    put(clients, "redlock:order:1")
    for client in clients:
        client.zadd("redlock:order:1#line", {b"\xff": math.inf, "b": -math.inf, "c": 1})
    for entries in (found(redlock), look(redlock, "order:1", 20)):
        assert [(e.kind, e.waiting) for e in entries] == [("lock", 3), ("line", 3)]
        assert entries[1].held_for == max(entries[1].waits) > 0


def test_survey_shows_names_of_any_bytes_as_they_are(
    redlock: Redlock, clients: list[redis.Redis]
) -> None:
    names = ["ä:\U0001f512", "a\x1b[31m\nb", "#slot2", "#line", "x#slotx", "\ud800"]
    for name in names:
        put(clients, b"redlock:" + name.encode("utf-8", "surrogatepass"))
    put(clients, b"redlock:\xff\xfe")
    assert {e.resource for e in found(redlock)} == {*names, "\udcff\udcfe"}


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ("*", {"a", "ab", "ä", "b", "a*", "[a]"}),
        ("a*", {"a", "ab", "a*"}),
        ("??", {"ab", "ä", "a*"}),  # as in Redis, a byte each
        ("[ab]", {"a", "b"}),
        (r"\[a\]", {"[a]"}),
        ("", set()),
    ],
)
def test_survey_matches_whole_names(
    redlock: Redlock, clients: list[redis.Redis], match: str, expected: set[str]
) -> None:
    for name in ("a", "ab", "ä", "b", "a*", "[a]"):
        put(clients[:3], f"redlock:{name}")
        put(clients[:3], f"redlock:{name}#reserved")
    entries = found(redlock, match)
    assert {e.resource for e in entries} == expected
    assert len(entries) == 2 * len(expected)


@pytest.mark.parametrize("prefix", ["a*[b]?", "a\\", "", "ü:"])
def test_survey_takes_glob_characters_of_a_prefix_literally(
    servers: Servers, clients: list[redis.Redis], prefix: str
) -> None:
    redlock = Redlock([server.url for server in servers], prefix=prefix or "redlock:")
    prefix = redlock.prefix
    put(clients, f"{prefix}order:1")
    put(clients, "aXb?order:2")
    assert [e.resource for e in found(redlock)] == ["order:1"]
    redlock.close()


def test_survey_finds_thousands_of_keys(redlock: Redlock, clients: list[redis.Redis]) -> None:
    names = [f"order:{number}" for number in range(2000)]
    for client in clients:
        with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.set(f"redlock:{name}", TOKENS[0], px=600_000)
            pipeline.execute()
    entries = found(redlock)
    assert {e.resource for e in entries} == set(names) and len(entries) == 2000
    assert all(e.nodes == 5 for e in entries)


def test_survey_names_nodes_that_hang_or_are_away_and_counts_the_others(
    redlock: Redlock, servers: Servers
) -> None:
    with redlock.lock("order:1"):
        servers[0].pause()
        servers[1].kill()
        seen = survey(redlock, timeout=1)
        servers[0].resume()
    assert [node.reachable for node in seen.looks] == [False, False, True, True, True]
    assert "no answer within 1 s" in seen.looks[0].error and seen.looks[1].error
    assert [node.rtt > 0 for node in seen.looks] == [False, False, True, True, True]
    (entry,) = seen.entries
    assert entry.nodes == 3 and entry.ttls[:2] == (None, None) and entry.held


def test_survey_of_too_few_nodes_is_an_error_that_names_them(
    redlock: Redlock, servers: Servers
) -> None:
    for server in servers[:3]:
        server.kill()
    for ask in (lambda: survey(redlock), lambda: look(redlock, "order:1")):
        with pytest.raises(QuorumUnavailable, match="2 of 5 nodes answered") as raised:
            ask()
        assert redlock.nodes[0] in str(raised.value)


def test_look_finds_all_slots_and_the_mark_of_the_holder(
    redlock: Redlock, clients: list[redis.Redis]
) -> None:
    put(clients, "redlock:order:1#slot100")
    put(clients, "redlock:" + MARK, DONE)
    put(clients, "redlock:order:10")
    assert [(e.resource, e.kind, e.slot) for e in look(redlock, "order:1")] == [
        (MARK.removesuffix("#done"), "mark", 1),
        ("order:1", "lock", 100),
    ]
    assert look(redlock, "order") == ()
    for key in ("order:1", "redlock:order:1", "redlock:order:1#reserved", "order:1#slot2"):
        assert look_for(redlock, key)[0] == "order:1"


def test_look_tells_a_name_that_begins_like_the_prefix_from_a_key(redlock: Redlock) -> None:
    redlock.acquire("redlock:pre")
    for key in ("redlock:pre", "redlock:redlock:pre"):
        resource, seen = look_for(redlock, key)
        assert resource == "redlock:pre"
        assert [entry.kind for entry in seen.entries] == ["lock"]
    redlock.acquire("pre")
    assert look_for(redlock, "pre")[0] == "pre"
    assert look_for(redlock, "redlock:redlock:pre")[0] == "redlock:pre"
    with pytest.raises(ConfigurationError, match="and both are known: write 'pre' for the one"):
        look_for(redlock, "redlock:pre")


def reading() -> bool:
    return any("celery_redlock read" in thread.name for thread in threading.enumerate())


def test_survey_leaves_no_thread_and_no_connection(
    redlock: Redlock, servers: Servers, clients: list[redis.Redis]
) -> None:
    def connected() -> list[int]:
        return [int(client.info("clients")["connected_clients"]) for client in clients[1:]]

    before = connected()
    servers[0].pause()
    survey(redlock, timeout=0.5)
    servers[0].resume()
    wait_until(lambda: connected() == before and not reading(), 20, "all have ended")


def test_survey_waits_for_a_node_that_goes_on_answering_but_not_for_ever(
    redlock: Redlock, monkeypatch: Patch
) -> None:
    def query(reader: Reader, times: int, pause: float) -> int:
        for _ in range(times):
            time.sleep(pause)
            reader.rtt()
        return times

    nodes = redlock.client.addresses
    looks, results = read_nodes(nodes, "redlock:", lambda reader: query(reader, 5, 0.25), 1.0)
    assert results == [5] * 5 and all(node.reachable for node in looks)
    monkeypatch.setattr("celery_redlock.survey.reader.MAX_TIMEOUTS", 2)
    looks, _ = read_nodes(nodes, "redlock:", lambda reader: query(reader, 10**6, 0.02), 0.3)
    assert {node.error for node in looks} == {"has not sent all its keys within 0.6 s"}
    wait_until(lambda: not reading(), 20, "they have ended")


@pytest.mark.parametrize("seed", range(3))
def test_patterns_match_the_names_that_a_server_matches(
    admins: list[redis.Redis], seed: int
) -> None:
    dice, letters = random.Random(seed), "ab^-![]\\*?"
    pieces = [*letters, "[a-b]", "[^a", "[b-]", "[\\]", "\\^", "**", "[]", "[^]", "[-b]", "a*"]
    names = {"".join(dice.choices(letters + "é", k=dice.randint(1, 4))) for _ in range(150)}
    patterns = ["".join(dice.choices(pieces, k=dice.randint(1, 5))) for _ in range(1500)]
    patterns += ["a\\^b", "*a*a*b*", "[^", "é*", "[é]?*", "[", "a[", "\\"]
    admins[0].mset(dict.fromkeys([*names, "a^b"], ""))
    with admins[0].pipeline(transaction=False) as pipeline:
        for pattern in patterns:
            pipeline.keys(pattern)
        answers = pipeline.execute()
    for pattern, keys in zip(patterns, answers, strict=True):
        fits = matching(pattern)
        assert {name for name in (*names, "a^b") if fits(name)} == set(keys), pattern


def test_patterns_of_many_stars_take_no_time(redlock: Redlock) -> None:
    name, begun = "a" * 512, time.monotonic()
    for pattern in ("*a" * 255 + "b", "?*" * 256, "[^a]*" * 100 + "b", "*" * 511 + "b"):
        assert not matching(pattern)(name) or pattern[0] == "?"
    assert time.monotonic() < begun + 2
    with pytest.raises(ConfigurationError, match="1 to 512 characters; it has 60000"):
        survey(redlock, "a" * 60_000)
