"""A node's report about itself: the INFO fields that decide if it may be a node, and may vote."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NodeInfo"]

NO_REPLICATION_ID = "0" * 40


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's report about itself.

    Attributes:
        run_id: The id of one run of one server; empty if not reported.
        uptime: Whole seconds since the server was started; None if not reported.
        role: "master" or "slave"; empty if not reported.
        master: For a replica, `host:port` of its master.
        cluster: True if it is a member of a Redis Cluster.
        history: The replication id it had before it was promoted; empty if it never was.
        replication: Its replication id; empty if not reported.
        appends: True if it has an append-only file.
        mark: The value of its `TRUSTED_KEY`: seconds, and a `memory`; empty if there is none.
        eviction: Its `maxmemory-policy`; empty if not reported.
        scripts: Why it runs no scripts; empty if it does.
        denied: Why it refused to report anything; empty if it did not refuse.
        unfit: Why it cannot be a node, in the words of its kind of store; empty if it can.
        remark: A warning of its kind of store; empty if there is none.
        twin: Index of another node that a nonce has shown to be the same server; None without one.
    """

    run_id: str = ""
    uptime: float | None = None
    role: str = ""
    master: str = ""
    cluster: bool = False
    history: str = ""
    replication: str = ""
    appends: bool = False
    mark: str = ""
    eviction: str = ""
    scripts: str = ""
    denied: str = ""
    unfit: str = ""
    remark: str = ""
    twin: int | None = None

    @classmethod
    def of(cls, info: str) -> NodeInfo:
        """Read the text of an INFO reply."""
        said = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
        history = said.get("master_replid2", NO_REPLICATION_ID)
        return cls(
            run_id=said.get("run_id", ""),
            uptime=_seconds(said.get("uptime_in_seconds", "")),
            role=said.get("role", ""),
            master=f"{said.get('master_host', '?')}:{said.get('master_port', '?')}",
            cluster=said.get("cluster_enabled") == "1",
            history="" if history == NO_REPLICATION_ID else history,
            replication=said.get("master_replid", ""),
            appends=said.get("aof_enabled") == "1",
            eviction=said.get("maxmemory_policy", ""),
        )

    def still(self, text: str) -> bool:
        """Return True if the lines of an INFO reply show that it is the same master as before."""
        return (
            "role:master\r\n" in text
            and f"master_replid:{self.replication}\r\n" in text
            and f"master_replid2:{self.history or NO_REPLICATION_ID}\r\n" in text
        )

    @property
    def memory(self) -> str:
        """The identity of this run of this server, with its replication history."""
        return f"{self.run_id} {self.replication} {self.history}"

    @property
    def trusted(self) -> float:
        """The seconds for which this memory has been known, from its mark; 0.0 without a mark."""
        seconds, _, memory = self.mark.partition(" ")
        return float(seconds) if self.history and memory == self.memory else 0.0

    @property
    def misfit(self) -> str:
        """The reason why it cannot be a node, whatever the other nodes are; empty if it can."""
        if self.unfit:
            return self.unfit
        if self.role not in ("", "master"):
            return f"it is a replica (READONLY) of {self.master}; configure its master instead"
        if self.scripts:
            return f"it runs no scripts, so no lock could be released there: {self.scripts}"
        if self.cluster:
            return "it is a member of a Redis Cluster (cluster_enabled:1), no independent master"
        return ""


def _seconds(uptime: str) -> float | None:
    """Return the seconds of an uptime, or None if the text is not one.

    An uptime is negative if the server's clock has been set back since its start. That may have
    been a moment ago, so a negative uptime counts as 0.0.
    """
    if not uptime.removeprefix("-").isdecimal() or len(uptime) >= 16:
        return None
    return max(0.0, float(uptime))
