"""CUDA and NCCL: the same engine on streams; skipped without two GPUs."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_fourmin.allreduce.engine import Engine
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.allreduce.topology import Topology

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


def nccl_rank(rank: int, port: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    timeout = timedelta(seconds=60)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=2, timeout=timeout, device_id=device)
    ways = [([0, 0], "ring"), ([0, 0], "torus"), ([0, 0], "hierarchical"), ([0, 1], "hierarchical"), ([0, 0], "hybrid")]
    for nodes, algorithm in ways:
        topology = Topology.build(nodes)
        table = AllReduceTable.from_cost_model(topology, "nccl")
        # Buckets of 4 and 28 bytes are hierarchical, the large one is a ring.
        table = table.with_switch(100) if algorithm == "hybrid" else table.only(algorithm)
        for wire_dtype in (None, torch.float16):
            engine = Engine(CommPlan(topology, table, wire_dtype), ProcessGroups.shared(timeout), device)
            meter = engine.measure()
            slow = torch.ones(4096, 4096, device=device)
            for _ in range(20):
                slow = slow @ slow.clamp(max=1e-3)
            done = torch.cuda.Event()
            futures = [
                engine.submit(torch.full((n,), rank + 1.0, device=device), i) for i, n in enumerate([1, 7, 1001])
            ]
            done.record()
            host_went_ahead = not done.query()
            means = [future.wait() for future in futures]
            torch.cuda.synchronize()
            assert all(bool((mean == 1.5).all()) for mean in means), (nodes, algorithm, wire_dtype)
            assert host_went_ahead, "submit waited for the device"
            communication = meter.take().communication()
            assert communication.num_bytes == 1009 * (wire_dtype or torch.float32).itemsize
            assert 0 < communication.exposed_s <= communication.busy_s < 10
            engine.raise_error()
            engine.close()
    dist.destroy_process_group()


def test_means_on_nccl_without_blocking_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.spawn(nccl_rank, args=(port,), nprocs=2)
