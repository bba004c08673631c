"""Examples of deployments: manifests, a compose file, units. Read only, without a cluster."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.config.options import GLOBAL
from celery_redlock.server import find_server, free_port
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.survey.snapshot import survey
from tests.support import wanting
from tests.support.machine import end_with_parent
from tests.support.nodes import ACL_RULE
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
DEFAULT_TTL = float(GLOBAL["ttl"].default)


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text("utf-8")))


FILES = sorted(path.name for path in (EXAMPLES / "kubernetes").iterdir())
ALL = [manifest for name in FILES for manifest in read(name)]
PODS = {m["metadata"]["name"]: m["spec"] for m in ALL if m["kind"] in ("Deployment", "StatefulSet")}
SECRETS = {m["metadata"]["name"]: m["stringData"] for m in ALL if m["kind"] == "Secret"}


def the(kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (
        manifest["spec"]
        for manifest in ALL
        if manifest["kind"] == kind and name in ("", manifest["metadata"]["name"])
    )
    return dict(found)


def labels(name: str) -> set[tuple[str, str]]:
    return set(PODS[name]["template"]["metadata"]["labels"].items())


def container(name: str) -> dict[str, Any]:
    (found,) = PODS[name]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("name", sorted(PODS))
def test_selectors_and_secrets_of_pods_exist(name: str) -> None:
    assert set(PODS[name]["selector"]["matchLabels"].items()) <= labels(name)
    for source in container(name).get("envFrom", []):
        assert source["secretRef"]["name"] in SECRETS
    assert {"requests", "limits"} == set(container(name)["resources"])


@pytest.mark.parametrize("name", sorted(PODS))
def test_pod_runs_without_root_and_without_rights(name: str) -> None:
    pod = PODS[name]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    whole, own = pod["securityContext"], container(name)["securityContext"]
    assert whole["runAsNonRoot"] is True and whole["runAsUser"] > 0 and whole["runAsGroup"] > 0
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def images() -> set[str]:
    compose = yaml.safe_load((EXAMPLES / "compose.yml").read_text("utf-8"))["services"]
    return {container(name)["image"] for name in PODS} | {
        one["image"] for one in compose.values() if "image" in one
    }


def test_images_of_others_have_a_whole_version_and_a_digest() -> None:
    """All have the same digest, and the page says how to look it up."""
    (image,) = images() - {"shop:1.0"}  # a reader's own
    name, digest = image.split("@")
    assert re.fullmatch(r"redis:\d+\.\d+\.\d+", name)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    assert f"inspect {name} " in (ROOT / "docs" / "operating.md").read_text("utf-8")


def test_passwords_of_compose_are_never_readable_by_others(tmp_path: Path) -> None:
    """Not even while they are written: the mode is right from the start."""
    text = (EXAMPLES / "compose.yml").read_text("utf-8")
    commands = text.partition("docker compose up")[0].partition("#\n")[2].replace("#     ", "")
    assert "chmod" not in commands
    seen = "; stat -c %a .env; done > .env"  # before it is whole
    commands = commands.rstrip("# \n").replace("\ndone > .env", seen, 1)
    subprocess.run(["/bin/sh", "-ec", f"umask 022; {commands}"], cwd=tmp_path, check=True)
    lines = (tmp_path / ".env").read_text().splitlines()
    assert lines[1::2] == ["600"] * 6
    assert [line.partition("=")[0] for line in lines[::2]] == [
        *(f"NODE{number}_PASSWORD" for number in range(1, 6)),
        "BROKER_PASSWORD",
    ]


def test_each_node_of_the_manifests_has_a_machine_and_a_disk_of_its_own() -> None:
    nodes = the("StatefulSet")
    (rule,) = nodes["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert set(rule["labelSelector"]["matchLabels"].items()) <= labels("redlock")
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert [claim["metadata"]["name"] for claim in nodes["volumeClaimTemplates"]] == ["data"]
    assert {"name": "data", "mountPath": "/data"} in container("redlock")["volumeMounts"]
    assert "dir /data\n" in SECRETS["redlock-nodes"]["redis.conf"]


def test_nodes_are_updated_one_at_a_time_and_vote_again_in_between() -> None:
    nodes = the("StatefulSet")
    assert nodes["updateStrategy"] == {"type": "RollingUpdate"}
    assert nodes["minReadySeconds"] > DEFAULT_TTL
    assert {"readinessProbe", "livenessProbe"} <= set(container("redlock"))
    budget = the("PodDisruptionBudget")
    assert budget["maxUnavailable"] == 1
    assert set(budget["selector"]["matchLabels"].items()) <= labels("redlock")


@pytest.mark.parametrize(("secret", "user"), [("redlock-client", "redlock"), ("redlock-look",) * 2])
def test_clients_of_the_manifests_name_every_node_once(secret: str, user: str) -> None:
    nodes, service = the("StatefulSet"), the("Service", "redlock")
    assert service["clusterIP"] == "None" and nodes["serviceName"] == "redlock"
    assert set(service["selector"].items()) <= labels("redlock")
    given = SECRETS[secret]["REDLOCK_NODES"].split(",")
    assert nodes["replicas"] == 5
    assert [str(address.name) for address in parse_nodes(given)] == [
        f"redlock-{number}.redlock:6379" for number in range(nodes["replicas"])
    ]
    assert all(url.startswith(f"rediss://{user}:") for url in given)
    (ca,) = {url.partition("?ssl_ca_certs=")[2] for url in given}
    pod = PODS["worker" if user == "redlock" else "redlock-exporter"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "ca"]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "ca"]
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "not a node's key"
    assert f"{mount['mountPath']}/ca.crt" == ca and mount["name"] == volume["name"]


def passwords(user: str) -> list[str]:
    """Return the password of a user at each node in turn."""
    users = [SECRETS["redlock-nodes"][f"redlock-{number}.acl"] for number in range(5)]
    return [re.findall(rf"^user {user} on >(\w+) ", text, re.M)[0] for text in users]


def test_each_node_has_a_password_that_no_other_node_takes() -> None:
    """Each client sends it to its node, which must not be able to use it at another node."""
    known = {"redlock": "redlock-client", "redlock-look": "redlock-look"}
    assert len({word for user in known for word in passwords(user)}) == 10
    for user, secret in known.items():
        given = SECRETS[secret]["REDLOCK_NODES"].split(",")
        assert [urlsplit(url).password for url in given] == passwords(user)


def test_node_sees_its_own_passwords_and_key_and_no_others() -> None:
    mounts = {one["mountPath"]: one for one in container("redlock")["volumeMounts"]}
    own = {path: one["subPathExpr"] for path, one in mounts.items() if "subPathExpr" in one}
    assert own == {
        "/etc/redis/users.acl": "$(POD_NAME).acl",
        "/etc/redis/node.crt": "$(POD_NAME).crt",
        "/etc/redis/node.key": "$(POD_NAME).key",
    }
    whole = {path for path, one in mounts.items() if not {"subPath", "subPathExpr"} & set(one)}
    assert whole == {"/data"}
    (name,) = container("redlock")["env"]
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_network_policy_lets_only_clients_reach_the_nodes() -> None:
    policy = the("NetworkPolicy")
    assert set(policy["podSelector"]["matchLabels"].items()) <= labels("redlock")
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    allowed = set(source["podSelector"]["matchLabels"].items())
    assert allowed <= labels("worker") and allowed <= labels("redlock-exporter")
    assert rule["ports"] == [{"protocol": "TCP", "port": 6379}]


def acl(user: str, page: str, password: str) -> str:
    text = (ROOT / "docs" / page).read_text("utf-8")
    (rule,) = re.findall(rf"^ACL SETUSER {user} (on .*)$", text, re.M)
    return f"user {user} {rule}".replace(">SECRET", f">{password}")


@pytest.mark.parametrize("number", range(5))
def test_acl_users_of_the_manifests_are_those_of_the_docs(number: int) -> None:
    locks, looks = passwords("redlock")[number], passwords("redlock-look")[number]
    assert SECRETS["redlock-nodes"][f"redlock-{number}.acl"].splitlines() == [
        "user default off",
        acl("redlock", "acl.md", locks),
        acl("redlock-look", "cli.md", looks),
    ]
    assert acl("redlock", "acl.md", "SECRET").endswith(" ".join(ACL_RULE))


@pytest.fixture(params=["tls", "plain"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server with configuration, users and certificate of the first node: scheme and port.

    Without TLS, which the bundled server has not, it has its users all the same.
    """
    tls = request.param == "tls"
    binary = wanting.tls_server() if tls else find_server()
    if binary is None:
        pytest.skip(wanting.NO_TLS)
    conf = SECRETS["redlock-nodes"]["redis.conf"]
    if tls:
        text = (ROOT / "docs" / "operating.md").read_text("utf-8")
        (commands,) = re.findall(r"^```sh\n(openssl .*?)^```$", text, re.M | re.S)
        subprocess.run(["/bin/sh", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
        for end in ("crt", "key"):
            (tmp_path / f"redlock-0.{end}").rename(tmp_path / f"node.{end}")
    else:
        conf = "".join(
            line for line in conf.splitlines(True) if not line.startswith(("tls", "port"))
        )
    conf = conf.replace("/data", str(tmp_path)).replace("/etc/redis", str(tmp_path))
    (tmp_path / "redis.conf").write_text(conf)
    (tmp_path / "users.acl").write_text(SECRETS["redlock-nodes"]["redlock-0.acl"])
    port = free_port()
    arguments = ["--tls-port" if tls else "--port", str(port), "--bind", "127.0.0.1"]
    process = subprocess.Popen(
        [binary, str(tmp_path / "redis.conf"), *arguments],
        preexec_fn=end_with_parent,
        stdout=subprocess.DEVNULL,
    )
    yield f"rediss://{port}" if tls else f"redis://{port}"
    process.kill()
    process.wait()


@pytest.mark.defaults
@pytest.mark.parametrize("secret", ["redlock-client", "redlock-look"])
def test_node_of_the_manifests_grants_a_lock(
    node: str, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = SECRETS[secret]["REDLOCK_NODES"].split(",")[0]
    scheme, port = node.split("://")
    url = url.replace(":6379/", f":{port}/").replace("/etc/redlock", str(tmp_path))
    if scheme == "redis":
        url = url.replace("rediss://", "redis://").partition("?")[0]
    find = socket.getaddrinfo

    def found(host: str, *rest: Any, **more: Any) -> Any:
        return find("127.0.0.1" if host == "redlock-0.redlock" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    redlock = Redlock([url], restart_guard="off")
    try:
        if secret == "redlock-look":
            assert not wait_until(lambda: seen(redlock), 20, "it answers").entries
            return
        lease = wait_until(lambda: attempt(redlock), 20, "it is up")
        assert redlock.release(lease) is True
    finally:
        redlock.close()


def seen(redlock: Redlock) -> Any:
    try:
        return survey(redlock)
    except QuorumUnavailable:
        return None


def attempt(redlock: Redlock) -> Any:
    try:
        return redlock.try_acquire("stock")
    except QuorumUnavailable as error:
        assert "may have forgotten" not in str(error), error
        return None


@pytest.mark.parametrize("page", ["django", "fastapi"])
def test_code_on_a_page_is_that_of_its_example(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    found = re.findall(r"^```py\n(.*?)^```$", text, re.M | re.S)
    sources = [path.read_text("utf-8") for path in EXAMPLES.rglob("*.py")]
    assert len(found) >= 2
    for block in found:
        assert any(block in source for source in sources), block


def test_compose_has_five_nodes_with_disks_of_their_own() -> None:
    whole = yaml.safe_load((EXAMPLES / "compose.yml").read_text("utf-8"))
    services = whole["services"]
    nodes = [name for name in services if name.startswith("node")]
    assert [services[name]["volumes"] for name in nodes] == [[f"{name}:/data"] for name in nodes]
    assert list(whole["volumes"]) == nodes and len(nodes) == 5
    for name in nodes:
        assert "--appendonly yes" in services[name]["command"]
        assert "--maxmemory-policy noeviction" in services[name]["command"]
        assert services[name]["networks"] == ["locks"]
    for name in (*nodes, "broker"):
        (config,) = services[name]["configs"]
        assert services[name]["command"].split()[1] == config["target"]
        word = f"{name.upper()}_PASSWORD"
        assert whole["configs"][config["source"]]["content"].startswith(f"requirepass ${{{word}:?")
        assert word not in services[name]["command"]
    assert services["broker"]["networks"] == ["tasks"]
    assert whole["networks"] == {"locks": {"internal": True}, "tasks": {}}
    for name in ("worker", "beat"):
        given = services[name]["environment"]["REDLOCK_NODES"].split(",")
        assert given == [f"redis://:${{{node.upper()}_PASSWORD}}@{node}:6379/0" for node in nodes]
        assert "${BROKER_PASSWORD}" in services[name]["environment"]["CELERY_BROKER_URL"]
        assert set(services[name]["networks"]) == {"locks", "tasks"}
        assert set(services[name]["depends_on"]) == {"broker", *nodes}
        assert services[name]["command"][0] == "celery"
        assert services[name]["read_only"] is True and services[name]["tmpfs"] == ["/tmp"]
    for one in services.values():
        assert one["cap_drop"] == ["ALL"] and one["security_opt"] == ["no-new-privileges:true"]
        assert int(one["user"].partition(":")[0]) > 0
    assert services["worker"]["stop_grace_period"] == "10m"
    assert services["beat"]["deploy"]["replicas"] == 2


def test_node_of_compose_starts_with_its_password_and_is_healthy(tmp_path: Path) -> None:
    whole = yaml.safe_load((EXAMPLES / "compose.yml").read_text("utf-8"))
    node, word = whole["services"]["node1"], "0123456789abcdef"
    content = re.sub(r"\$\{NODE1_PASSWORD.*\}", word, whole["configs"]["node1"]["content"])
    port, path = free_port(), tmp_path / "redlock.conf"
    path.write_text(content)
    options = node["command"].partition("/etc/redlock.conf ")[2].split()
    process = subprocess.Popen(
        [find_server(), str(path), *options, "--port", str(port), "--dir", str(tmp_path)],
        preexec_fn=end_with_parent,
        stdout=subprocess.DEVNULL,
    )
    lock = Redlock([f"redis://:{word}@127.0.0.1:{port}/0"])
    try:
        assert lock.release(wait_until(lambda: attempt(lock), 20, "it is trusted")) is True
        _cmd, program, *check = node["healthcheck"]["test"]
        if shutil.which(program) is not None:
            command = [program, "-p", str(port), *check]
            assert subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    finally:
        lock.close()
        process.kill()
        process.wait()


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze is installed")
    text = (EXAMPLES / "systemd" / "shop-worker.service").read_text("utf-8")
    text = text.replace("/srv/shop/.venv/bin/celery", "/bin/true")
    (tmp_path / "shop-worker.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "shop-worker.service"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "shop" in line]) == (
        0,
        [],
    )
