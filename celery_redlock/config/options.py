"""The table of options: name, type, default, check, meaning.

Every option is either global (`redlock_x` in the Celery configuration), or an option of a task
(`lock_x` on a `SingletonTask`, `x` in `@locked`), or both: then the global one is the default of
the tasks. Durations are seconds. The attributes of `Settings` and `TaskOptions` are the table:
`GLOBAL` and `TASK` are read from them, and so are the docs. Type checkers need a second list
(`typed.py`, `SingletonTask`), and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..protocol.errors import ConfigurationError
from . import checks
from .checks import DAY, MIN_TTL, ConflictPolicy, OnDuplicate, Scope

if TYPE_CHECKING:
    from ..protocol.rate import Rate

__all__ = ["GLOBAL", "TASK", "Option", "Settings", "TaskOptions", "check_option"]


Key: TypeAlias = Sequence[str] | Callable[..., str | Collection[str]] | None
LimitOption: TypeAlias = int | Sequence[int] | Callable[..., int | Sequence[int]]
OnConflict: TypeAlias = ConflictPolicy | Callable[[Any, Any], str]
OnDeadline = Literal["raise", "skip", "reject"]
OnUnavailable = Literal["retry", "raise", "run"]
LossPolicy = Literal["raise", "log"]
OnLost: TypeAlias = LossPolicy | Callable[[Any], object]


class Option:
    """One option, without its name and type.

    Args:
        default: Its default.
        check: The check of its values.
        about: Its effect, for the docs.
        change: When to change it, for the docs.
    """

    def __init__(self, default: Any, check: checks.Check, about: str, change: str) -> None:
        self.default = default
        self.check = check
        self.about = about
        self.change = change


def _option(default: Any, check: checks.Check, about: str, change: str) -> Any:
    return Option(default, check, about, change)


class _CommonOptions:
    """The options that an app can set for all its tasks, and a task for itself.

    It is not a dataclass: to make one takes as long as all other imports of a program with a task.
    """

    def __init__(self, **given: Any) -> None:
        vars(self).update(_DEFAULTS[type(self)], **given)

    ttl: float = _option(
        30.0,
        checks.seconds(
            MIN_TTL,
            day="a holder that dies blocks the resource for that long. A lease is extended while"
            " its task runs, so the ttl can be short",
        ),
        "How long the nodes keep a lock that nobody extends. It does not limit the task: while the"
        " body runs, its lease is extended after each third of the ttl.",
        "The default suits most. A longer ttl outlasts longer pauses of a process and longer"
        " absences of the nodes. A shorter one frees the keys of a dead machine sooner, and gives"
        " a restarted node its vote back sooner. Below a few seconds, ordinary pauses cost locks."
        " Beats may have [a shorter one](beat.md#how-late-a-tick-may-be) than workers.",
    )
    wait: float = _option(
        0.5,
        checks.seconds(zero=True),
        "How long a task waits for its lock *in its pool slot* before the conflict policy applies."
        " Tasks that can be [parked](hot-keys.md) do not wait there. The app's setting is used only"
        " if the policy is `retry` and the task cannot be parked. Without a `wait` of the task"
        " itself, the policies `wait` and `replace` use the task's ttl, and the others do not"
        " wait. A `wait` of the task itself applies to every policy; then a task that can be parked"
        " waits in its slot, too, if another worker or program has its lock.",
        "Raise it for a task that cannot be parked and whose lock is mostly held for moments.",
    )
    retry_backoff: float = _option(
        1.0,
        checks.seconds(),
        "The longest delay with which a waiting task is published again for the first time. The"
        " delay is random, and this limit doubles with every attempt. A task that workers park"
        " comes back within 0.3 s, whatever is set here, and waits there.",
        "Raise it if tasks that cannot be parked try too often.",
    )
    retry_backoff_max: float = _option(
        60.0,
        checks.seconds(),
        "The longest delay, at which the doubling of `retry_backoff` ends.",
        "Lower it if a free key must not stay unused for a minute because all its waiters sleep.",
    )
    retry_deadline: float | None = _option(
        None,
        checks.or_none(checks.seconds()),
        "Seconds after which a waiting task gives up and `on_deadline` applies. They count while"
        " one and the same holder is in the way, or too few nodes answer, and start again when"
        " the key changes hands. `None` means never.",
        "Set it if a task is worth nothing after a while, or if its failure should show you that"
        " a holder is stuck.",
    )
    max_lifetime: float | None = _option(
        DAY,
        checks.or_none(checks.seconds()),
        "The longest time for which a lock is extended, so that a task that hangs does not keep it"
        " forever. After that the lease is lost and `on_lost` applies, even if the ttl is longer;"
        " the key stays locked until the body ends, for a ttl at most. `None` means no limit.",
        "Raise it for tasks that run for more than a day. Lower it if the key of a task that hangs"
        " must become free sooner.",
    )
    fencing: bool = _option(
        False,
        checks.flag,
        "Give every lease a fencing token: a number that grows with each grant of its resource, so"
        " that the system you write to can refuse a holder that has been overtaken.",
        "Turn it on where an overlap would corrupt data, and"
        " [compare the numbers](fencing.md) there.",
    )


class Settings(_CommonOptions):
    """The global options of an app, checked."""

    nodes: Sequence[Any] = _option(
        None,
        checks.nodes,
        "The servers that keep the locks: independent Redis masters, by URLs, clients or mappings"
        " of connection arguments; or one URL of PostgreSQL, etcd or ZooKeeper. One string with"
        " commas between URLs, as from an environment variable, is a list of them. `None` means"
        " one node: the broker, if that is a Redis.",
        "Set it to have [three or five](operating.md#how-many), which survive the loss of a server."
        " All programs must name the same nodes.",
    )
    prefix: str = _option(
        "redlock:",
        checks.text,
        "The prefix of all keys on the nodes.",
        "If several applications share the nodes, give each its own. All programs of one"
        " application must have the same.",
    )
    node_timeout: float = _option(
        0.25,
        checks.seconds(0.001),
        "How long to wait for a node's answer. Never more than a tenth of the ttl.",
        "Raise it if healthy nodes are reported as late, because they are far away or busy.",
    )
    keeper: str = _option(
        "thread",
        checks.one_of(Literal["thread", "process"]),
        "The extender of a process's locks. `thread`: one of its threads; in a prefork worker the"
        " main process helps. `process`: a separate small process as well, which goes on while a C"
        " call keeps the GIL, and releases the locks of a killed worker at once. It takes about"
        " 25 MB and logs to stderr.",
        "Set it to `process` for C calls or greenlets that compute for longer than the ttl,"
        " and for a ttl of a second or two beside threads that compute.",
    )
    restart_guard: str = _option(
        "auto",
        checks.one_of(Literal["auto", "uptime", "off"]),
        "Whether a node that has just been started may vote. `uptime`: it has no vote until it is"
        " up for longer than the longest ttl in use, because it may have forgotten locks."
        " `off`: it votes. `auto`: `uptime` with three nodes or more, or where a standby takes the"
        " place of a node by itself (PostgreSQL, Sentinel); otherwise `off`. See [the restart"
        " guard](restart-guard.md), also for etcd and ZooKeeper.",
        "With three nodes or more, set it to `off` in tests, in CI and in Docker Compose, where"
        " servers have just been started and nothing of value can be forgotten, or if your locks"
        " only save work. `uptime` guards one node too, at the price of a ttl without locks after"
        " each of its starts.",
    )
    enabled: bool = _option(
        True,
        checks.flag,
        "Whether tasks take locks at all.",
        "Set it to `False` in tests only. A worker without locks logs a warning.",
    )
    parking: bool = _option(
        True,
        checks.flag,
        "Whether a worker parks tasks that wait for a lock: it holds their messages back in its"
        " main process, without a pool slot and without polling, and lets them go one after the"
        " other. See [Hot keys](hot-keys.md). `False`: each waits in its slot for `wait`, and is"
        " published again after a random time.",
        "Turn it off if the main process must not hold back messages, for their memory or because"
        " your keys are expensive to make.",
    )
    parking_memory: int = _option(
        64 * 2**20,
        checks.memory,
        "How much memory parked tasks may take in a worker's main process, in bytes; by default"
        " 64 MiB. A task counts as 12 kB and 3.5 times the body of its message, as was measured."
        " Tasks beyond that are sent again, with pauses that grow: see [Hot"
        " keys](hot-keys.md#what-a-worker-holds-back).",
        "Raise it if more tasks wait for hot keys at a time; lower it if a worker must not"
        " become so large.",
    )
    events: bool = _option(
        False,
        checks.flag,
        "Send the events `task-lock-waiting`, `task-lock-acquired` and `task-lock-lost` to"
        " programs that monitor the workers, such as Flower.",
        "Turn it on if a monitor should show locks; see [Signals, events, traces](signals.md).",
    )
    docs: str = _option(
        "docs/{page}.md",
        checks.page_address,
        "Where the pages of this documentation are: an address in which `{page}` stands for the"
        " name of a page. `release`, `explain` and the [alerts](metrics.md#dashboard-and-alerts)"
        " name pages by it. Commands without an app take it as `--docs`.",
        "Set it where you publish the pages, as `https://docs.example.org/{page}.html`.",
    )
    beat: bool = _option(
        None,
        checks.or_none(checks.flag),
        "Send each tick of a periodic task once, however many beats run. `None`: wherever a node is"
        " known; without one the beat logs a warning, and sends everything. `True`: without one it"
        " does not start.",
        "Set it to `False` if only one beat runs, and must send even when the nodes are away.",
    )
    beat_on_unavailable: str = _option(
        "hold",
        checks.one_of(Literal["hold", "send"]),
        "What a beat does with a due tick while too few nodes answer. `hold`: it sends the tick"
        " once they answer again. `send`: every beat sends it.",
        "Set it to `send` if a tick that comes twice is better than one that comes late.",
    )


class TaskOptions(_CommonOptions):
    """All options of a task: each is its own, or else the app's, or else the default.

    Attributes:
        wait: The wait of the task's policy, in seconds; 0 if a function chooses the policy later.
        waits: By policy, the seconds that a task with that policy waits in its process.
    """

    key: Key = _option(
        None,
        checks.key,
        "The key to lock: a template, such as `order:<order_id>`; a list of templates, for all or"
        " none of several keys; a list of arguments' names; or a function that is called with the"
        " arguments. `None`: the task's name and all its arguments.",
        "Set it if fewer arguments decide, or if several tasks share a key: [keys](keys.md).",
    )
    scope_name: str | None = _option(
        None,
        checks.or_none(checks.text),
        "The beginning of the key. `None`: the task's name, or nothing if the key is a template.",
        "Give two tasks the same one if they should exclude each other.",
    )
    limit: LimitOption = _option(
        1,
        checks.limit,
        "How many bodies may run at a time per key: a number; of several keys, also one for each;"
        " or a function of the task's arguments that returns one of these.",
        "Raise it where a few at a time do no harm: [a limit](keys.md#a-limit).",
    )
    shared: bool = _option(
        False,
        checks.flag,
        "Whether the task only reads what its key names: bodies of tasks with `shared` run side by"
        " side, and never beside one without. See [readers and writers](shared.md). Redis only.",
        "Set it for the tasks that read, if others with the same key write.",
    )
    rate: str | None = _option(
        None,
        checks.or_none(checks.rate),
        "How many bodies may start per key, over all workers: `10/m` is at most 10 in any 60"
        " seconds; also `s`, `h`, `d` and `10/5m`. The bodies run under no lock, and may overlap.",
        "Set it where something must not be called too often: [rates](rates.md).",
    )
    burst: int | None = _option(
        None,
        checks.or_none(checks.count),
        "How many of a `rate` may start at once. `10/m` with 3: three in any 18 seconds.",
        "Set it to spread the starts of a rate over its time.",
    )
    scope: Scope = _option(
        "while_executing",
        checks.one_of(Scope),
        "When a key is taken: while the body runs, or from the task's publication on, by a"
        " reservation. See [the scopes](uniqueness.md#scopes).",
        "Choose one that begins with `until` to keep copies of a task out of the queue.",
    )
    reserve_ttl: float | None = _option(
        None,
        checks.or_none(checks.seconds(MIN_TTL)),
        "How long the nodes keep a reservation, counted from the message's ETA. A worker that"
        " holds the message extends it. `None`: until the message expires, or an hour if it does"
        " not. One call can ask for up to 31 days from now; for more only if more is declared"
        " here.",
        "Raise it if messages may lie in the queue for more than an hour before a worker sees"
        " them.",
    )
    on_duplicate: OnDuplicate = _option(
        "existing",
        checks.one_of(OnDuplicate),
        "What a call gets if its key is reserved for another task: that task's result"
        " (`existing`), a `DuplicateTask` (`raise`), a result that is marked as skipped (`skip`),"
        " or its place: the queued task is revoked (`replace`). See"
        " [what a duplicate gets](uniqueness.md#what-a-duplicate-gets).",
        "Set it to `replace` for a debounce, where the last call should run and not the first.",
    )
    hold_for: float = _option(
        0.0,
        checks.seconds(
            zero=True,
            day="a restarted node has no vote on it for that long. To keep a key longer, reserve"
            " it: scope 'until_expired' and reserve_ttl",
        ),
        "The shortest time for which a lock is kept, counted from its grant, even if the body ends"
        " earlier.",
        "Raise it to keep a task from running again too soon. A restarted node has no vote on this"
        " task for that long, if it is longer than the ttl.",
    )
    on_conflict: OnConflict = _option(
        "retry",
        checks.or_callable(checks.one_of(ConflictPolicy), "the holder", "the request"),
        "What a task does if another holds its lock. See [Policies](policies.md#on_conflict).",
        "Set it to `skip` if a copy that comes while another runs has nothing to do, to `raise` or"
        " `reject` if you handle conflicts yourself.",
    )
    on_deadline: OnDeadline = _option(
        "raise",
        checks.one_of(OnDeadline),
        "What a task does when `retry_deadline` is over, or the wait of `wait` and `replace`. See"
        " [Policies](policies.md#on_deadline). Refused if the task has neither.",
        "Set it to `skip` or `reject` if the end of the wait is not a failure.",
    )
    on_unavailable: OnUnavailable = _option(
        "retry",
        checks.one_of(OnUnavailable),
        "What a task does if too few nodes answer. See [Policies](policies.md#on_unavailable).",
        "Set it to `run` only where a double run is better than none.",
    )
    on_lost: OnLost = _option(
        "raise",
        checks.or_callable(checks.one_of(LossPolicy), "the lease"),
        "What happens to a body whose lease is lost. See [Policies](policies.md#on_lost).",
        "Set it to `log` or a function if the body checks `current_lease().lost` itself and must"
        " not be interrupted.",
    )
    progress_timeout: float | None = _option(
        None,
        checks.or_none(checks.seconds(0.1)),
        "The longest time without a report of progress: see [Alive but stuck](progress.md).",
        "Set it for work that can hang, and call `current_lease().progress()` in its loops.",
    )
    waits: Mapping[str, float] = MappingProxyType({})

    def replace(self, **given: Any) -> TaskOptions:
        """Return a copy of the options with some of them replaced."""
        return TaskOptions(**{**vars(self), **given})

    @property
    def pace(self) -> Rate | None:
        """The rate that `rate` and `burst` describe; None without one."""
        if self.rate is None:
            return None
        from ..protocol.rate import rate_of  # imported here: most programs have no rate

        return rate_of(self.rate, self.burst)


def _table(of: type) -> dict[str, Option]:
    every = [item for kind in reversed(of.__mro__) for item in vars(kind).items()]
    return {name: option for name, option in every if isinstance(option, Option)}


GLOBAL: Mapping[str, Option] = _table(Settings)
TASK: Mapping[str, Option] = _table(TaskOptions)
_DEFAULTS: Mapping[type, Mapping[str, Any]] = {
    kind: {name: option.default for name, option in table.items()}
    for kind, table in ((Settings, GLOBAL), (TaskOptions, TASK))
}


def check_option(name: str, value: Any, label: str | None = None) -> Any:
    """Check the value of one option and return it; an error calls it by `label`, else by `name`.

    Raises:
        ConfigurationError: The value cannot work. The message says why, and what to give instead.
    """
    option = TASK.get(name) or GLOBAL[name]
    try:
        return option.check(value)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{label or name} {error}; it is {value!r}") from None
