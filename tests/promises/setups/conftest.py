"""pytest-celery's fixtures, over processes of this machine, and over Docker where a daemon answers.

A test here uses `celery_setup` alone, and runs twice:

- `local`: the broker and the backend are local servers, so are the three lock nodes, and the worker
  is a process, in a directory with just the files that a container would be given. This is what
  `make test` runs.
- `docker`: each of them is a container of pytest-celery's, and the worker's image is made of this
  clone (`Dockerfile`). Skipped where no Docker daemon answers. No machine that this was written on
  has one, so it is less proven than the rest: what is sure is that it asks pytest-celery's own
  fixtures for its containers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from pytest_celery import (
    CELERY_REDIS_BACKEND,
    CELERY_REDIS_BROKER,
    CeleryTestBackend,
    CeleryWorkerContainer,
    RedisContainer,
    RedisTestBackend,
)
from pytest_celery.defaults import DEFAULT_WORKER_VOLUME, REDIS_CONTAINER_TIMEOUT
from pytest_celery.vendors.redis.backend import fixtures as of_backend
from pytest_celery.vendors.redis.broker import fixtures as of_broker
from pytest_docker_tools import build, container, fxtr

from celery_redlock.server import LocalServer, start_servers
from tests.support.containers import LocalProcess, LocalRedis, LocalServerProcess, LocalWorker

ROOT = Path(__file__).parents[3]
NODES = 3


@functools.cache
def no_docker() -> str:
    """Why there is no Docker; empty if there is."""
    if not (os.environ.get("DOCKER_HOST") or Path("/var/run/docker.sock").exists()):
        return "no Docker daemon: there is no DOCKER_HOST and no /var/run/docker.sock"
    # In another process: the SDK leaves a socket open where nobody answers.
    ask = "import docker; docker.from_env(timeout=10).ping()"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return f"no Docker daemon answers: {last[0]}" if done.returncode else ""


@pytest.fixture(scope="session")
def docker_client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """In place of pytest-docker-tools' plugin, which our pyproject.toml switches off."""
    import docker

    request.config.option.reuse_containers = False
    with contextlib.closing(docker.from_env()) as client:
        yield client


@pytest.fixture(params=["local", "docker"])
def where(request: pytest.FixtureRequest) -> str:
    """Where a test's processes run."""
    if request.param == "docker" and (why := no_docker()):
        pytest.skip(why)
    return str(request.param)


# -- The servers: nodes, broker, backend


@pytest.fixture(scope="module")
def local_servers() -> Iterator[list[LocalServer]]:
    with start_servers(NODES + 2) as servers:
        yield servers


docker_broker = of_broker.default_redis_broker
docker_backend = of_backend.default_redis_backend


def docker_node() -> Any:
    return container(
        image="{default_redis_broker_image}",
        ports=fxtr("default_redis_broker_ports"),
        environment=fxtr("default_redis_broker_env"),
        network="{default_pytest_celery_network.name}",
        wrapper_class=RedisContainer,
        timeout=REDIS_CONTAINER_TIMEOUT,
        command=fxtr("default_redis_broker_command"),
    )


docker_node_1, docker_node_2, docker_node_3 = docker_node(), docker_node(), docker_node()


@pytest.fixture
def lock_nodes(where: str, request: pytest.FixtureRequest) -> list[RedisContainer]:
    """The nodes of the locks."""
    if where == "docker":
        return [request.getfixturevalue(f"docker_node_{number}") for number in (1, 2, 3)]
    return [local(server) for server in request.getfixturevalue("local_servers")[:NODES]]


def local(server: LocalServer) -> LocalRedis:
    server.restart()  # empty, whatever the last test did
    return LocalRedis(LocalServerProcess(server))


@pytest.fixture
def default_redis_broker(where: str, request: pytest.FixtureRequest) -> RedisContainer:
    if where == "docker":
        return request.getfixturevalue("docker_broker")
    return local(request.getfixturevalue("local_servers")[NODES])


@pytest.fixture
def default_redis_backend(where: str, request: pytest.FixtureRequest) -> RedisContainer:
    if where == "docker":
        return request.getfixturevalue("docker_backend")
    return local(request.getfixturevalue("local_servers")[NODES + 1])


@pytest.fixture
def celery_broker(where: str, request: pytest.FixtureRequest) -> Any:
    """Redis alone; tests/promises/worker has those with RabbitMQ."""
    return request.getfixturevalue(CELERY_REDIS_BROKER)


@pytest.fixture
def celery_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Its own end asks all objects of the process for their class: some that other tests have left,
    # such as Django's settings, raise.
    monkeypatch.setattr(RedisTestBackend, "teardown", CeleryTestBackend.teardown)
    return request.getfixturevalue(CELERY_REDIS_BACKEND)


# -- The worker


@pytest.fixture
def default_worker_tasks() -> set[ModuleType]:
    # Not executed here: a shared task would become one of every app in this process.
    spec = importlib.util.spec_from_file_location(
        "setup_tasks", Path(__file__).with_name("tasks.py")
    )
    assert spec is not None
    return {importlib.util.module_from_spec(spec)}


@pytest.fixture
def default_worker_app(celery_setup_app: Celery, lock_nodes: list[RedisContainer]) -> Celery:
    """Return the app with the settings of the worker."""
    celery_setup_app.conf.update(
        redlock_nodes=[node.celeryconfig["url"] for node in lock_nodes],
        redlock_restart_guard="off",
        redlock_ttl=3.0,
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        worker_concurrency=2,
    )
    return celery_setup_app


redlock_worker_image = build(path=str(ROOT), dockerfile="tests/promises/setups/Dockerfile")

docker_worker = container(
    image="{redlock_worker_image.id}",
    environment=fxtr("default_worker_env"),
    network="{default_pytest_celery_network.name}",
    volumes={"{default_worker_volume.name}": DEFAULT_WORKER_VOLUME},
    wrapper_class=CeleryWorkerContainer,
    timeout=60,
    command=fxtr("default_worker_command"),
)


@pytest.fixture
def local_worker(
    tmp_path: Path,
    default_worker_initial_content: dict[str, bytes],
    default_worker_command: list[str],
    default_worker_env: dict[str, str],
) -> Iterator[LocalWorker]:
    """The same files, command and environment as a container gets."""
    for name, text in default_worker_initial_content.items():
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).write_bytes(text)
    env = {**os.environ, **default_worker_env, "PYTHONPATH": f"{tmp_path / 'app'}:{ROOT}"}
    process = LocalProcess(
        [sys.executable, "-m", *default_worker_command],
        output=tmp_path / "worker.log",
        env=env,
        cwd=tmp_path / "app",
    )
    try:
        worker = LocalWorker(process)
        worker.ready()
        yield worker
    finally:
        process.kill()


@pytest.fixture
def default_worker_container(where: str, request: pytest.FixtureRequest) -> CeleryWorkerContainer:
    return request.getfixturevalue("docker_worker" if where == "docker" else "local_worker")


@pytest.fixture
def send(celery_setup: Any) -> Callable[..., Any]:
    """Sends `work`, by its name: its module is not loaded here."""

    def work(key: str, seconds: float = 0.0) -> Any:
        return celery_setup.app.send_task("setups.work", args=[key, seconds])

    return work
