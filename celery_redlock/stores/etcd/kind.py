"""etcd as a kind of store."""

from __future__ import annotations

from ..contract import Can, Kind

__all__ = ["KIND"]

KIND = Kind(
    name="etcd",
    # When a new leader is elected, all leases start anew, and keys last longer than their ttl. A
    # transaction cannot name the key of the waiter that it finds.
    can=Can(queues=True, keeps=True, wakes_waiters=False, ends_on_time=False),
    parse="celery_redlock.stores.etcd.address:parse",
    node="celery_redlock.stores.etcd.node:EtcdNode",
    reader="celery_redlock.stores.etcd.reader:EtcdReader",
    subscription="celery_redlock.stores.etcd.subscription:EtcdSubscription",
    forgets="was its data lost or a backup restored, was a lease of it revoked",
    many="clusters",
    together="The members of one cluster stand in it together: etcd://one:2379,two:2379",
    verify="write ca=PATH in its URL, and not verify=no",
    doctor="celery_redlock.doctor.etcd",
    directory="lock/",
)
