"""Celery signals for the events of locks, and for tasks that are skipped.

    from celery_redlock.signals import lock_lost

    @lock_lost.connect
    def page(sender=None, resource=None, loss=None, **more):
        ...

A receiver takes keyword arguments and must end with `**more`, because later versions may send more.
`sender` is the task. It is None outside tasks, and if the process has not imported the task (such
as a beat). `resource` is the locked resource, as one text. Times are seconds.

`lock_acquired` (resource, lease, owner, waited, attempts)
    A lock was granted. `owner` is the `Owner` that asked. `waited` is the time since the task first
    met a held lock or no quorum, over all its deliveries and by the hosts' wall clocks; or else
    since the call. `attempts` is how often the nodes were asked in that time. In a block, or a
    plain call, both are for this call only.
`lock_contended` (resource, holder, waited)
    A call for a lock was refused because another holds it. It is sent once per call, when the call
    gives up, and not for each attempt. `holder` is a `Holder`, or None if the nodes did not agree
    on one.
`lock_unavailable` (resource, votes, waited)
    A call for a lock was refused because no quorum answered. `votes` has one `NodeVote` per node.
`lock_extended` (resource, lease)
    A quorum renewed a lease. This is often: every ttl/3 for each lock.
`lock_lost` (resource, loss)
    A lease ended before its holder released it: the work may overlap with another's. `loss` is a
    `LeaseLost` with `reason`, `owner`, `task`, `held_for`, `votes`, `lease`. It is sent once per
    lease. With the reason `"stalled"` it is sent for each silence: the work reports no progress,
    and keeps its lock.
`lock_released` (resource, lease, held, held_for)
    A lock was released. `held` is True if it was ours to the end, and False after it was lost.
    `held_for` is the time since it was granted.
`task_skipped` (resource, task_id, holder, where, policy)
    A task's body is not run, because another has its key. `where` is `"publish"` (a duplicate that
    was not sent) or `"run"`. `policy` is the value of `on_duplicate` (`"existing"`, `"skip"`,
    `"raise"`, `"replace"`); it is `"skip"` also for `on_conflict` and `on_deadline`; or it is
    `"done"`, for a second delivery of a message whose work is done. `holder` is the `Owner` of the
    key, or None. `task_id` is the id of the skipped task; if it was not sent, the id that it would
    have had.
`beat_deduplicated` (resource, entry, tick, where)
    A beat found that another beat has sent a due tick. `entry` is the `ScheduleEntry`, `tick` the
    tick's name, `where` is `"beat"`.

A signal is sent in the process and in the thread where the event happens. For a lock around a task
that is the process of the body (with prefork a pool child); for `lock_extended` and `lock_lost` it
is another thread there. When a pool child has died, the worker's main process releases its locks,
and sends `lock_released` there (`held_for` is computed from the token's wall clock). With
`redlock_keeper = "process"` another small process releases them, where there are no receivers.

No signal is sent for reservations and for claims of beats; for a lock that `hold_for` leaves to
expire; for locks that expire by their ttl after a whole worker has died; while a task is parked,
because no node is asked for it; and for a block or a call inside another that shares its lock.

Be quick: a lock waits for the receiver, and in `lock_extended` and `lock_lost` all leases of the
process do. An exception from a receiver is logged (`celery.utils.dispatch.signal`) and stops
nothing. While no receiver is connected to any of the `lock_...` signals, they cost a lock nothing.
"""

from __future__ import annotations

from .messages.signals import (
    beat_deduplicated,
    lock_acquired,
    lock_contended,
    lock_extended,
    lock_lost,
    lock_released,
    lock_unavailable,
    task_skipped,
)

__all__ = [
    "beat_deduplicated",
    "lock_acquired",
    "lock_contended",
    "lock_extended",
    "lock_lost",
    "lock_released",
    "lock_unavailable",
    "task_skipped",
]
