"""The lock in coroutines: `async with`, a wait that can be cancelled, a lock that is lost.

python coroutines.py    # with a Redis on this machine; for more than one see orders.py
"""

from __future__ import annotations

import asyncio
import os

from celery_redlock import AsyncRedlock, NotAcquired

nodes = os.environ.get("REDLOCK_NODES", "redis://localhost:6379/1").split(",")
redlock = AsyncRedlock(nodes, ttl=5.0)  # made at import: it connects in the loop that uses it
stock = {"apples": 10}  # stands for a resource that can neither count nor lock by itself


async def take(item: str) -> None:
    async with redlock.lock(f"stock:{item}", wait=10.0) as lease:  # extended until the block ends
        left = stock[item] - 1
        await asyncio.sleep(0.01)
        lease.ensure()  # still ours? Else LeaseLost, and nothing is written
        stock[item] = left


async def impatient() -> None:
    """Cancel a wait: it ends, and leaves nothing on the nodes."""
    async with redlock.lock("stock:apples"):
        try:
            waits = asyncio.create_task(take("apples"))
            await asyncio.wait_for(waits, 0.2)
        except asyncio.TimeoutError:
            print("impatient: it was taken, so no apple")


async def may_be_lost() -> None:
    """Cancel the work of a block when its lease ends."""
    work = asyncio.create_task(asyncio.sleep(3600))
    async with redlock.lock("report", max_lifetime=0.5, on_lost=lambda lease: work.cancel()):
        await asyncio.wait([work])
        print(f"may be lost: its work was cancelled: {work.cancelled()}")


async def main() -> None:
    await asyncio.gather(*[take("apples") for _ in range(5)])
    print(f"five took one apple each: {stock['apples']} left")
    await impatient()
    await may_be_lost()
    print(f"now held by {await redlock.holder('stock:apples')}")


if __name__ == "__main__":
    try:
        asyncio.run(main())  # its end closes the connections
    except NotAcquired as refusal:  # held by another, or too few nodes answered
        raise SystemExit(f"no lock: {refusal}") from None
