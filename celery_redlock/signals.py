"""Celery signals that tell what becomes of locks, and of tasks that are kept out.

    from celery_redlock.signals import lock_lost

    @lock_lost.connect
    def page(sender=None, resource=None, loss=None, **more):
        ...

A receiver takes keyword arguments and must end with `**more`: there may be more some day. `sender`
is the task, or None: outside tasks, and where a process does not know the task (a beat that has not
imported it). `resource` is what is locked, as one text. Times are seconds.

`lock_acquired` (resource, lease, owner, waited, attempts)
    A lock was granted. `owner` (`Owner`) says who asked. `waited`: since the task first met the
    lock held or no quorum, over all its deliveries and by the hosts' wall clocks; else since the
    call. `attempts`: how often the nodes were asked, in all that time. In a block, or a plain
    call, both are of this call alone.
`lock_contended` (resource, holder, waited)
    A call for a lock was refused: another holds it. Once for each call, when it gives up, not for
    each attempt in it. `holder` is a `Holder`, or None if the nodes did not agree on one.
`lock_unavailable` (resource, votes, waited)
    A call for a lock was refused: no quorum answered. `votes` has one `NodeVote` for each node.
`lock_extended` (resource, lease)
    A quorum renewed a lease. Every ttl/3 for each lock: often.
`lock_lost` (resource, loss)
    A lease ended before its holder released it: the work may overlap with another's. `loss` is a
    `LeaseLost`: `reason`, `owner`, `task`, `held_for`, `votes`, `lease`. Once for each lease. With
    the reason `"stalled"`, for each silence: the work reports no progress, and keeps its lock.
`lock_released` (resource, lease, held, held_for)
    A lock was given back. `held`: it was ours to the end; False after it was lost. `held_for`:
    since it was granted.
`task_skipped` (resource, task_id, holder, where, policy)
    A task's body is not run, since another has its key. `where` is `"publish"` (a duplicate that
    was not sent) or `"run"`. `policy`: what `on_duplicate` says (`"existing"`, `"skip"`,
    `"raise"`, `"replace"`); `"skip"` as well for `on_conflict` and `on_deadline`; or `"done"`: a
    second delivery of a message that was worked on to its end. `holder` is the `Owner` of the key,
    or None. `task_id`: of the one that is skipped; if it is not sent, the id it would have had.
`beat_deduplicated` (resource, entry, tick, where)
    A beat found that another has sent a tick that is due. `entry` is the `ScheduleEntry`, `tick`
    the tick's name, `where` is `"beat"`.

In which process: in the one where it happens, in the thread where it does. Of a lock around a task
that is the process of the body (with prefork a pool child), for `lock_extended` and `lock_lost` a
thread beside it. When a pool child has died, the worker's main process frees what it held, and
sends `lock_released` there (`held_for` from the token's wall clock); with `redlock_keeper =
"process"` another small process frees it, where nobody listens. Not sent: for reservations and for
claims of beats; for a lock that `hold_for` leaves to expire; for what expires by its ttl when a
whole worker has died; while a task is parked, for it asks nobody; for a block or a call inside one
that shares its lock.

Be quick: a lock, and in `lock_extended` and `lock_lost` the leases of the whole process, wait for
the receiver. One that raises is logged (`celery.utils.dispatch.signal`) and stops nothing. While no
receiver is connected to any of the `lock_...` signals, a lock makes nothing for them.
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
