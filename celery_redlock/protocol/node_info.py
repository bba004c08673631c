"""What a node says of itself: the fields of INFO that decide whether it may be a node, and vote."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NodeInfo"]

NO_REPLICATION_ID = "0" * 40


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself.

    Attributes:
        run_id: Names one run of one server; empty if it does not say.
        uptime: Whole seconds since it was started; None if it does not say.
        role: "master" or "slave"; empty if it does not say.
        master: Of a replica: `host:port` of its master.
        cluster: Whether it is a member of a Redis Cluster.
        history: The replication id it had before it was promoted; empty if it never was.
        replication: Its replication id; empty if it does not say.
        appends: Whether it has an append-only file.
        mark: What `TRUSTED_KEY` says there: seconds, and `memory`; empty if nothing.
        eviction: Its `maxmemory-policy`; empty if it does not say.
        scripts: Why it runs no scripts; empty if it does.
        denied: Why it does not tell us anything; empty if it does.
        unfit: Why it cannot be a node, in the words of its kind of store; empty if it can.
        twin: Index of a node that is this same server, as a nonce has shown; None if none is.
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
        """Whether it is said, as lines of an INFO reply, that it is a master as before."""
        return (
            "role:master\r\n" in text
            and f"master_replid:{self.replication}\r\n" in text
            and f"master_replid2:{self.history or NO_REPLICATION_ID}\r\n" in text
        )

    @property
    def memory(self) -> str:
        """Names this run of this server, with the history that it has."""
        return f"{self.run_id} {self.replication} {self.history}"

    @property
    def trusted(self) -> float:
        """For how many seconds this memory has been known, as its mark says; else 0.0."""
        seconds, _, memory = self.mark.partition(" ")
        return float(seconds) if self.history and memory == self.memory else 0.0

    @property
    def misfit(self) -> str:
        """Why it cannot be a node, whatever the other nodes are; empty if it can."""
        if self.unfit:
            return self.unfit
        if self.role not in ("", "master"):
            return f"it is a replica (READONLY) of {self.master}; configure its master instead"
        if self.scripts:
            return f"it runs no scripts, so no lock could be given back there: {self.scripts}"
        if self.cluster:
            return "it is a member of a Redis Cluster (cluster_enabled:1), no independent master"
        return ""


def _seconds(uptime: str) -> float | None:
    """Read an uptime. It is negative where the server's clock was set back since its start, which
    may have been a moment ago."""
    if not uptime.removeprefix("-").isdecimal() or len(uptime) >= 16:
        return None
    return max(0.0, float(uptime))
