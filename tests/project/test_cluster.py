"""The emulated cluster of the benchmarks: real namespaces, removed on every way out, and a polite refusal."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ClusterUnavailable, EmulatedCluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def namespaces(cluster: EmulatedCluster) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(cluster.prefix)]


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        with EmulatedCluster(1, 1, "1gbit"):
            return True
    except ClusterUnavailable:
        return False


needs_namespaces = pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip and tc")


@needs_namespaces
def test_ranks_of_two_nodes_reach_each_other(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "print('SUM', int(x))\n"
        "dist.destroy_process_group()\n"
    )
    with EmulatedCluster(2, 1, "1gbit") as cluster:
        assert len(namespaces(cluster)) == 3
        assert "SUM 2" in cluster.run(script, timeout_s=60)
    assert namespaces(cluster) == []


@needs_namespaces
def test_a_failing_rank_is_named_and_everything_is_removed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit('broken')\ntime.sleep(600)\n"
    )
    with pytest.raises(RuntimeError, match=r"ranks \[1\].*(\n.*)*broken"), EmulatedCluster(1, 2, "1gbit") as cluster:
        cluster.run(script, timeout_s=60)
    assert namespaces(cluster) == []


def test_refuses_politely_without_root() -> None:
    # A real setuid could not read a checkout below /root, so the script is told that it is not root.
    command = [sys.executable, "-c", _NOT_ROOT, str(BENCHMARKS / "allreduce.py"), "--nodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "needs root" in done.stderr or "iproute2" in done.stderr
    assert "Traceback" not in done.stderr


_NOT_ROOT = (
    "import os, runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, os.path.dirname(sys.argv[0]));"
    "os.geteuid = lambda: 65534; runpy.run_path(sys.argv[0], run_name='__main__')"
)
