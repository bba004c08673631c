"""A FastAPI app that sends locked tasks, and takes a lock itself.

In this directory, with a Redis on this machine (for more than one see orders.py):

    celery -A fastapi_app:tasks worker --loglevel INFO     # in one terminal
    uvicorn fastapi_app:app                                # in another; or: python fastapi_app.py

Code that waits for a broker or for nodes is in plain `def` functions: FastAPI runs them in threads.
In an `async def` it would block the event loop, and with it all other requests.
"""

from __future__ import annotations

import asyncio
import os
import time

import httpx
from celery import Celery
from celery.result import AsyncResult
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from celery_redlock import QuorumUnavailable, Redlock, ResourceHeld, SingletonTask, Skipped

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")

tasks = Celery("fastapi_app", broker=BROKER, backend=BROKER)
tasks.conf.redlock_nodes = os.environ.get("REDLOCK_NODES", "redis://localhost:6379/1").split(",")
redlock = Redlock.from_app(tasks)  # the same nodes and settings, outside tasks

app = FastAPI()
stock = {"apples": 10}  # stands for a resource that can neither count nor lock by itself


@tasks.task(base=SingletonTask, lock_key="report:<report_id>", lock_scope="until_executed")
def rebuild(report_id: int) -> str:
    time.sleep(1.0)
    return f"report {report_id}"


@app.post("/reports/{report_id}", status_code=202)
def ask(report_id: int) -> dict[str, str]:
    """Start a rebuild, or return the id of the one that is queued or running."""
    return {"task": rebuild.delay(report_id).id}


@app.get("/tasks/{task_id}")
def look(task_id: str) -> dict[str, object]:
    """Return the state at once: a request that waits in `.get()` occupies a thread meanwhile."""
    found = AsyncResult(task_id, app=tasks)
    if found.successful() and Skipped.of(found.result):
        return {"state": "SKIPPED"}
    return {"state": found.state, "result": found.result if found.successful() else None}


def take(item: str, count: int) -> int:
    with redlock.lock(f"stock:{item}", wait=2.0) as lease:
        left = stock[item] - count
        time.sleep(0.05)
        lease.ensure()  # still ours? Else LeaseLost, and nothing is written
        stock[item] = left
    return left


@app.post("/stock/{item}/take")
def take_in_a_thread(item: str, count: int = 1) -> int:
    return take(item, count)


@app.post("/stock/{item}/give")
async def give_from_async(item: str, count: int = 1) -> int:
    """The whole block goes to a thread: to take, to work and to free."""
    return await run_in_threadpool(take, item, -count)


@app.exception_handler(ResourceHeld)
def held(request: Request, error: ResourceHeld) -> JSONResponse:
    return JSONResponse({"detail": "somebody else is at it"}, 409, {"Retry-After": "1"})


@app.exception_handler(QuorumUnavailable)
def no_quorum(request: Request, error: QuorumUnavailable) -> JSONResponse:
    return JSONResponse({"detail": "try again later"}, 503, {"Retry-After": "10"})


async def main() -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=30) as client:
        asked = await asyncio.gather(*[client.post("/reports/7") for _ in range(3)])
        ids = {answer.json()["task"] for answer in asked}
        print(f"three asked for one report: {len(ids)} task")
        while (task := (await client.get(f"/tasks/{min(ids)}")).json())["state"] == "PENDING":
            await asyncio.sleep(0.1)
        print(f"{task['state']}: {task['result']}")
        paths = ["/stock/apples/take", "/stock/apples/give"] * 4
        codes = {answer.status_code for answer in await asyncio.gather(*map(client.post, paths))}
        print(f"four took an apple and four gave one: {stock['apples']} left, {codes}")


if __name__ == "__main__":
    asyncio.run(main())
