"""An emulated cluster on one machine: a network namespace a node, each with a link of its own rate.

            bridge (a namespace of its own)
           /        |         \\
     eth0 node0  eth0 node1  eth0 node2      each node's end: tc tbf at `rate`
       ranks       ranks       ranks         ranks of a node share its link and its loopback

With a latency the bridge is `delay_switch.py`, which delivers packets late.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SUBNET = "10.213.7"
BURST_KB = 64
LATENCY_MS = 200
"""How long a packet may queue at a node's end before it is dropped."""
JUMBO_MTU = 9000
"""With latency: fewer packets for the switch, which shares the cores with the ranks."""
SWITCH = Path(__file__).with_name("delay_switch.py")


class ClusterUnavailable(RuntimeError):
    """This machine cannot make network namespaces."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ClusterUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


class EmulatedCluster:
    """Context manager: `nodes` namespaces with `ranks_per_node` ranks each, links of `rate` (tc syntax: 1gbit).

    `latency_ms` is how long a packet travels from one node to another, beside the time that its bytes take. Ranks are
    started with `run`; leaving the context stops every process and removes every namespace, also on error.
    """

    def __init__(self, nodes: int, ranks_per_node: int, rate: str, latency_ms: float = 0.0) -> None:
        if nodes < 1 or ranks_per_node < 1:
            raise ValueError(f"nodes and ranks_per_node must be at least 1, got {nodes} and {ranks_per_node}")
        self.nodes, self.ranks_per_node, self.rate, self.latency_ms = nodes, ranks_per_node, rate, latency_ms
        self._switch: subprocess.Popen[str] | None = None
        self.prefix = f"fm{os.getpid()}"
        self._ranks: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise ClusterUnavailable(f"needs {' and '.join(missing)}: install iproute2")
        if os.geteuid() != 0:
            raise ClusterUnavailable("needs root to make network namespaces: run it with sudo")
        self._previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _namespace(self, node: int) -> str:
        return f"{self.prefix}n{node}"

    def _build(self) -> None:
        if self.latency_ms:
            self._build_with_latency()
        else:
            self._build_bridge()
        for node in range(self.nodes):
            shape = ("tbf", "rate", self.rate, "burst", f"{BURST_KB}kb", "latency", f"{LATENCY_MS}ms")
            _run("tc", "-n", self._namespace(node), "qdisc", "add", "dev", "eth0", "root", *shape)

    def _build_with_latency(self) -> None:
        names = [self._namespace(node) for node in range(self.nodes)]
        for node, name in enumerate(names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "tuntap", "add", "dev", "eth0", "mode", "tun")
            _run("ip", "-n", name, "addr", "add", f"{SUBNET}.{node + 1}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "mtu", str(JUMBO_MTU), "txqueuelen", "10000", "up")
        command = [sys.executable, str(SWITCH), "--latency-ms", str(self.latency_ms), *names]
        self._switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise ClusterUnavailable("the switch with latency did not start: needs /dev/net/tun")

    def _build_bridge(self) -> None:
        bridge = f"{self.prefix}b"
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for node in range(self.nodes):
            name = self._namespace(node)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run(
                "ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{node}", "netns", bridge
            )
            _run("ip", "-n", name, "addr", "add", f"{SUBNET}.{node + 1}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", bridge, "link", "set", f"p{node}", "master", "br0", "up")

    def _remove(self) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.wait(timeout=10)
        self._ranks.clear()
        if self._switch is not None:
            self._switch.communicate(timeout=10)
        for name in [self._namespace(node) for node in range(self.nodes)] + [f"{self.prefix}b"]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def run(self, script: Path, arguments: Sequence[str] = (), timeout_s: float = 600, port: int = 29500) -> str:
        """Runs `script` once a rank with torchrun's variables set; returns what rank 0 printed."""
        world = self.nodes * self.ranks_per_node
        with tempfile.TemporaryDirectory(prefix="fourmin-cluster-") as folder:
            logs = [Path(folder) / f"rank{rank}.log" for rank in range(world)]
            for rank, path in enumerate(logs):
                node, local = divmod(rank, self.ranks_per_node)
                environment = os.environ | {
                    "MASTER_ADDR": f"{SUBNET}.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
                    "GROUP_RANK": str(node),
                    "NODE_RANK": str(node),
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "TORCHELASTIC_RUN_ID": self.prefix,
                    "OMP_NUM_THREADS": "1",
                }
                command = ["ip", "netns", "exec", self._namespace(node), sys.executable, str(script), *arguments]
                with path.open("wb") as log:
                    self._ranks.append(
                        subprocess.Popen(
                            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                        )
                    )
            self._wait(logs, timeout_s)
            self._ranks.clear()
            return logs[0].read_text()

    def _wait(self, logs: list[Path], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(rank.poll() is None for rank in self._ranks):
            failed = [i for i, rank in enumerate(self._ranks) if rank.poll()]
            if failed:
                time.sleep(1.0)
                told = "\n".join(f"--- rank {i}\n{logs[i].read_text()[-2000:]}" for i in failed)
                raise RuntimeError(f"ranks {failed} of the emulated cluster failed:\n{told}")
            if time.monotonic() > deadline:
                missing = [i for i, rank in enumerate(self._ranks) if rank.poll() is None]
                raise TimeoutError(
                    f"ranks {missing} did not end within {timeout_s:.0f} s: {logs[0].read_text()[-2000:]}"
                )
            time.sleep(0.05)
        failed = [i for i, rank in enumerate(self._ranks) if rank.returncode]
        if failed:
            raise RuntimeError(f"ranks {failed} failed:\n{logs[failed[0]].read_text()[-2000:]}")
