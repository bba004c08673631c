"""Beats in a world without sockets, threads and real time: Celery's schedulers, the real guard.

Each beat is a process of its own as far as it can tell: an app, a scheduler, a `Redlock`. They
share five fake nodes and one clock, which moves when a beat sleeps, asks a node or sends. Each
message is written down with its time.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
from celery import Celery
from celery.beat import Scheduler, event_t

from celery_redlock.beat.scheduler import SchedulerAdapter
from celery_redlock.keepalive import watchdog as due
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round
from celery_redlock.protocol.values import Owner
from celery_redlock.testing.fakes import FakeNode
from tests.promises.beat.beat_moments import ZONES, utc
from tests.support.clock import FakeClock
from tests.support.fake_lock import FakeDriver, FakeRedlock, FakeWatchdog

Schedule = Callable[[], Mapping[str, Any]]
ROUND = 0.0005
"""Seconds that nodes take to answer."""
PASS = 0.0002
"""Seconds that a beat takes for one pass over its schedule."""
LATE = 0.003
"""Seconds by which a beat wakes up late, at most."""


class Killed(BaseException):
    """Ends a beat wherever it is."""


class Plain(Scheduler):
    """A schedule in memory; the flow of the Celery that is installed."""

    producer = None
    world: World
    beat: Beat

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        if self.world.before_applying is not None:
            self.world.before_applying(self.beat, entry.name)
        super().apply_entry(entry, producer=producer)


class Older(Plain):
    """The flow of Celery up to 5.6, word for word: asks the first entry before its time too."""

    def tick(
        self,
        event_t: Any = event_t,
        min: Any = min,
        heappop: Any = heapq.heappop,
        heappush: Any = heapq.heappush,
    ) -> float:
        adjust = self.adjust
        max_interval = self.max_interval
        if self._heap is None or not self.schedules_equal(self.old_schedulers, self.schedule):
            self.old_schedulers = copy.copy(self.schedule)
            self.populate_heap()
        H = self._heap
        if not H:
            return max_interval
        event = H[0]
        entry = event[2]
        is_due, next_time_to_run = self.is_due(entry)
        if is_due:
            verify = heappop(H)
            if verify is event:
                next_entry = self.reserve(entry)
                self.apply_entry(entry, producer=self.producer)
                heappush(H, event_t(self._when(next_entry, next_time_to_run), event[1], next_entry))
                return 0
            else:
                heappush(H, verify)
                return min(verify[0], max_interval)
        adjusted = adjust(next_time_to_run)
        return min(adjusted if isinstance(adjusted, (int, float)) else max_interval, max_interval)


class Shared(Plain):
    """The flow of celery-redbeat: all beats keep in one place when each entry was sent."""

    store: dict[str, tuple[datetime, int]]

    def setup_schedule(self) -> None:
        pass

    @property
    def schedule(self) -> Any:
        entries = {}
        for name, fields in self.app.conf.beat_schedule.items():
            entries[name] = entry = self.Entry(**fields, name=name, app=self.app)
            entry.last_run_at, entry.total_run_count = self.store.setdefault(
                name, (entry.last_run_at, 0)
            )
        return entries

    def reserve(self, entry: Any) -> Any:
        entry = next(entry)
        self.store[entry.name] = entry.last_run_at, entry.total_run_count
        return entry

    def maybe_due(self, entry: Any, **kwargs: Any) -> Any:
        is_due, next_time_to_run = entry.is_due()
        if is_due:
            try:
                self.apply_async(entry, **kwargs)
            except Exception as error:
                self.logger.error("Scheduler: Message Error: %s", error)
        return next_time_to_run

    def tick(self, **_kwargs: Any) -> float:
        times = [self.maybe_due(entry, producer=None) for entry in self.schedule.values()]
        return min([time for time in times if time] + [self.max_interval])


FLOWS = [Plain, Older]
"""Schedulers with Celery's `tick`, and with that of schedulers written after an older Celery."""
KINDS = [Plain, pytest.param(Older, marks=pytest.mark.slow), Shared]
"""Where the flow is not what matters: `make test` takes Celery's."""


class Message(NamedTuple):
    """A message that was sent.

    Attributes:
        at: Seconds since the world's begin.
        entry: The entry's name.
        beat: Who sent it, by number.
        options: All else that `send_task` was given.
    """

    at: float
    entry: str
    beat: int
    options: dict[str, Any]


class BeatDriver(FakeDriver):
    """Writes down when nodes were asked; they take a moment. Other beats' attempts may interfere.

    Attributes:
        asked: When, and what for.
        tried: How often each resource was.
        rival: Says whether an attempt meets those of others, which keep it from a quorum.
    """

    def __init__(self, nodes: Sequence[FakeNode], clock: FakeClock) -> None:
        super().__init__(nodes, clock)
        self.asked: list[tuple[float, str]] = []
        self.tried: Counter[str] = Counter()
        self.rival: Callable[[], bool] = lambda: False

    def _carry(self, round_: Round) -> None:
        self.asked.append((self.clock(), round_.verb.word))
        resource = round_.claims[0].resources[0]
        self.tried[resource] += round_.verb.word == "acquire"
        split = round_.verb.word == "acquire" and self.rival()
        if split:  # two nodes went to one of them, and one to another
            for index, pid in ((2, 7), (3, 7), (4, 8)):
                node = self.nodes[index]
                if node.token(resource, self.clock()) is None:
                    token = Owner("rival", pid).token("")
                    node.held[resource] = token, self.clock() + 0.002
        super()._carry(round_)
        self.clock.advance(ROUND)


class BeatWatchdog(FakeWatchdog):
    """A watchdog with its own times of extensions; `tend()` is the next turn of its thread."""

    def __init__(self, redlock: FakeRedlock, clock: FakeClock) -> None:
        super().__init__(redlock, clock)
        self.due = due.Schedule()

    def watch(
        self, claim: Claim, lost: Any, max_lifetime: float | None = None, _block: object = None
    ) -> None:
        until = self._clock() + max_lifetime if max_lifetime else math.inf
        self.due.add(due.Watched(claim, until, lost), self._clock())

    def drop(self, claim: Claim) -> None:
        self.due.drop(claim)

    def tend(self) -> None:
        taken = self.due.take(self._clock()) if self.due.wakes <= self._clock() else []
        alive, over = self.due.part(taken, self._clock())
        claims = [watched.claim for watched in alive]
        renewed: list[Claim] = []
        if alive:
            self._redlock.client._extend(claims, renewed.extend)
        for watched in self.due.settle([*alive, *over], renewed, self._clock()):
            watched.lost(watched.claim)


class Beat:
    """A beat.

    Attributes:
        skew: Seconds by which its host's time of day is ahead.
        wake: When its sleep ends, by the world's clock.
        passes: When it went over its schedule.
    """

    def __init__(
        self, world: World, kind: type[Plain], schedule: Schedule, skew: float, main: str
    ) -> None:
        self.number = number = len(world.beats)
        self.world = world
        self.skew = skew
        self.wake = world.clock()
        self.alive = True
        self.busy = False
        self.passes: list[float] = []
        self.redlock = FakeRedlock(world.patch, ttl=world.ttl)
        self.redlock.clock = world.clock
        self.redlock.fakes = world.nodes
        watchdog: Any = BeatWatchdog(self.redlock, world.clock)
        self.redlock.client.watchdog = self.watchdog = watchdog
        driver: Any = BeatDriver(world.nodes, world.clock)
        self.redlock.client.driver = self.driver = driver
        for module in ("locking.held", "locking.leases", "beat.claims", "beat.scheduler"):
            world.patch.setattr(f"celery_redlock.{module}.monotonic", world.clock)
        self.app = Celery(main, set_as_current=False)
        self.app.conf.update(
            timezone=world.zone, result_expires=None, beat_schedule=schedule(), beat_sync_every=1
        )
        self.app.now = lambda: (world.now() + timedelta(seconds=skew)).astimezone(ZONES[world.zone])
        self.app.send_task = lambda task, args, kwargs, **options: world.publish(
            self, args[0], {"task": task, **options}
        )
        mine = {"world": world, "beat": self, "store": world.store}
        self.scheduler = type(kind.__name__, (kind,), mine)(self.app)
        self.guard = SchedulerAdapter(self.scheduler, self.redlock, world.on_unavailable)
        self.guard._claims._owner = Owner(f"host{number}", 100 + number)

    def entry(self, name: str) -> Any:
        return self.scheduler.schedule[name]

    def die(self) -> None:
        """Die as by `kill -9`, without another message."""
        self.alive = False
        self.driver.dead = set(range(5))

    def stop(self, seconds: float) -> None:
        """Stop by SIGSTOP, and go on by SIGCONT after so many seconds."""
        self.wake = max(self.wake, self.redlock.clock() + seconds)


class World:
    """Beats, five nodes, a broker, and a clock.

    Attributes:
        kind: The scheduler.
        before_applying: Called with a beat and an entry's name when it has claimed a tick.
        before_sending: The same, later: when the broker is given the message. May raise.

    Args:
        patch: Puts the clock where the library looks at its own.
        schedule: Makes the schedule that all beats are configured with.
        kind: The scheduler.
        beats: When each of them starts, in seconds.
        ttl: redlock_ttl; seconds.
        on_unavailable: redlock_beat_on_unavailable.
        begin: When it all begins.
        zone: The apps' time zone.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        schedule: Schedule,
        *,
        kind: type[Plain] = Plain,
        beats: Sequence[float] = (0.0, 0.3, 0.7),
        ttl: float = 10.0,
        on_unavailable: str = "hold",
        begin: str = "2026-11-21 10:00:00",
        zone: str = "UTC",
    ) -> None:
        random.seed(1)
        self.patch = patch
        # What a killed beat held is nobody's in this process.
        patch.setattr(
            "celery_redlock.locking.stack._blocks", ContextVar("of_this_world", default=())
        )
        self.ttl = ttl
        self.zone = zone
        self.on_unavailable = on_unavailable
        self.clock = FakeClock()
        self.nodes = [FakeNode() for _ in range(5)]
        self.store: dict[str, tuple[datetime, int]] = {}
        self.sent: list[Message] = []
        self.before_applying: Callable[[Beat, str], None] | None = None
        self.before_sending: Callable[[Beat, str], None] | None = None
        self._begin = utc(begin)
        self._origin = self.clock()
        self.kind, self._schedule = kind, schedule
        self.beats: list[Beat] = []
        for start in sorted(beats):
            self.run(start - self.time)
            self.start()

    @property
    def time(self) -> float:
        """Seconds since the begin."""
        return self.clock() - self._origin

    def now(self) -> datetime:
        """The time of day, in UTC."""
        return self._begin + timedelta(seconds=self.time)

    def start(
        self, schedule: Schedule | None = None, *, skew: float = 0.0, main: str = "shop"
    ) -> Beat:
        """Start another beat, with its own schedule, time of day or app if given."""
        beat = Beat(self, self.kind, schedule or self._schedule, skew, main)
        self.beats.append(beat)
        return beat

    def run(self, seconds: float, every: Callable[[], object] | None = None) -> None:
        """Let time pass, for all beats that live and are not in the middle of something.

        Args:
            seconds: How much.
            every: Called after each pass.
        """
        end = self.clock() + seconds
        while True:
            awake = [beat for beat in self.beats if beat.alive and not beat.busy]
            beat = min(awake, key=lambda one: one.wake, default=None)
            if beat is None or beat.wake > end:
                break
            self.clock.now = max(self.clock(), beat.wake)
            self._pass(beat)
            if every is not None:
                every()
        self.clock.now = max(self.clock(), end)

    def run_meanwhile(self, beat: Beat, seconds: float) -> None:
        """The same while `beat` is busy sending; its claim is extended."""
        for _ in range(round(seconds / 0.1)):
            beat.watchdog.tend()
            self.run(0.1)

    def publish(self, beat: Beat, entry: str, options: dict[str, Any]) -> None:
        """Publish a message, as the broker of a beat's app."""
        if self.before_sending is not None:
            self.before_sending(beat, entry)
        self.sent.append(Message(self.time, entry, beat.number, options))

    def times(self, entry: str) -> list[float]:
        """Return when an entry was sent; seconds since the beginning."""
        return [message.at for message in self.sent if message.entry == entry]

    def split(self, within: float = 0.005) -> None:
        """From now on attempts so close together keep each other from a quorum."""
        for beat in self.beats:
            beat.driver.rival = lambda beat=beat: any(
                other is not beat and other.alive and self._is_at_it(other, within)
                for other in self.beats
            )

    def _is_at_it(self, beat: Beat, within: float) -> bool:
        now = self.clock()
        tried = [when for when, verb in beat.driver.asked[-3:] if verb == "acquire"]
        return 0 <= beat.wake - now < within or any(now - when < within for when in tried)

    def _pass(self, beat: Beat) -> None:
        beat.busy = True
        beat.passes.append(self.time)
        assert len(beat.passes) < 300 or self.time - beat.passes[-300] > 1.0, "it spins"
        try:
            wait = beat.scheduler.tick()
        except Killed:
            return
        finally:
            beat.busy = False
            self.clock.advance(PASS)
        late = random.uniform(0.0, LATE) if wait > 0 else 0.0
        beat.wake = max(beat.wake, self.clock() + max(0.0, wait) + late)


Worlds = Callable[..., World]
"""Makes a `World`; its first argument and the kind of scheduler are given."""


@pytest.fixture(params=KINDS)
def any_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Worlds:
    """Makes a world; a test that asks for it is run with each kind of scheduler."""
    return partial(World, monkeypatch, kind=request.param)


@pytest.fixture(params=FLOWS)
def any_flow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Worlds:
    """The same with each flow."""
    return partial(World, monkeypatch, kind=request.param)
