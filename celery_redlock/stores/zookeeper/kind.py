"""ZooKeeper as a kind of store."""

from __future__ import annotations

from ..contract import Can, Kind

__all__ = ["KIND"]

KIND = Kind(
    name="ZooKeeper",
    can=Can(ttl_per_key=False, ends_on_time=False, queues=True),
    parse="celery_redlock.stores.zookeeper.address:parse",
    store="celery_redlock.stores.zookeeper.store:ZooKeeperStore",
    subscription="celery_redlock.stores.zookeeper.subscription:ZooKeeperSubscription",
    forgets="was its session ended, was its data lost or a backup restored",
    client="kazoo",
    extra="zookeeper",
    many="ensembles",
    together="The servers of one ensemble stand in it together: zookeeper://one:2181,two:2181/root",
    verify="write ca=PATH in its URL, and not verify=no",
    doctor="celery_redlock.doctor.zookeeper",
)
