"""The engine in real ranks: means of any size and dtype, many buckets at once, 16-bit range and any timing."""

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fourmin.allreduce.algorithms import usable_algorithms
from lightning_fourmin.allreduce.engine import Engine
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import CHUNK_BYTES, AllReduceTable, Row
from lightning_fourmin.allreduce.topology import Topology
from tests.support.parity import digest
from tests.support.pool import RankPool
from tests.support.ranks import current_case

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = (0, 1, 2, 3, 17, 1001)
LARGE = 3_000_001
SMALLEST_FP16 = 2.0**-24
LARGEST_FP16 = 65504.0


@dataclass(frozen=True)
class Bucket:
    """A bucket of random gradients: every rank can make those of every rank."""

    numel: int
    dtype: torch.dtype
    number: int

    def gradients(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        return torch.randn(self.numel, generator=generator).to(self.dtype)

    def error(self, found: Tensor, wire_dtype: torch.dtype | None) -> float:
        """Largest distance from the mean in FP64, in units of the last place of the largest gradient that went in."""
        mean, largest = _mean_and_largest(self, current_case().world)
        places = max(torch.finfo(self.dtype).eps, torch.finfo(wire_dtype or self.dtype).eps)
        return float(((found.double() - mean).abs() / (places * largest)).max()) if self.numel else 0.0


@lru_cache
def _mean_and_largest(bucket: Bucket, world: int) -> tuple[Tensor, Tensor]:
    gradients = torch.stack([bucket.gradients(rank).double() for rank in range(world)])
    return gradients.mean(0), gradients.abs().amax(0)


def topology(group_size: int | None = None, node_of: Sequence[int] | None = None) -> Topology:
    nodes = current_case().nodes
    return Topology.build(node_of or [node for node, size in enumerate(nodes) for _ in range(size)], group_size)


@contextmanager
def engine(
    algorithm: str | None = None,
    group_size: int | None = None,
    node_of: Sequence[int] | None = None,
    timeout_s: float = 60.0,
    chunk_bytes: int = CHUNK_BYTES,
    wire_dtype: torch.dtype | None = None,
    predivide: float | None = None,
    **kwargs: Any,
) -> Iterator[Engine]:
    """An engine as the strategy builds it; without an algorithm small, middle and large buckets take different ones."""
    where = topology(group_size, node_of)
    if algorithm is not None:
        table = AllReduceTable.from_cost_model(where, "gloo").only(algorithm)
    else:
        bests = {100: "hierarchical", 10_000: "torus", 300_000: "ring"}
        names = usable_algorithms(where)
        rows = [Row(n, {name: 1.0 if name == best else 9.0 for name in names}) for n, best in bests.items()]
        table = AllReduceTable(where.key, "gloo", "made for a test", tuple(rows))
    groups = ProcessGroups.shared(timedelta(seconds=timeout_s))
    table = replace(table, chunk_bytes=chunk_bytes)
    plan = CommPlan(where, table, wire_dtype, predivide)
    with closing(Engine(plan, groups, torch.device("cpu"), **kwargs)) as made:
        yield made


def reduce_all(made: Engine, buckets: Sequence[Bucket]) -> list[tuple[str, float]]:
    """Digest of each mean, and on rank 0 its error; all buckets are under way at once."""
    rank = current_case().rank
    futures = [made.submit(bucket.gradients(rank), index) for index, bucket in enumerate(buckets)]
    means = [future.wait() for future in futures]
    made.raise_error()
    assert all(mean.dtype is bucket.dtype for mean, bucket in zip(means, buckets, strict=True))
    return [
        (digest(mean.view(torch.uint8)), bucket.error(mean, made.plan.wire_dtype) if rank == 0 else 0.0)
        for mean, bucket in zip(means, buckets, strict=True)
    ]


def check(answers: list[Any], what: Any, largest_error: float) -> None:
    """All ranks have the same bits, and rank 0 the right ones."""
    for i, (_, error) in enumerate(answers[0]):
        assert len({answer[i][0] for answer in answers}) == 1, f"ranks differ in bucket {i} of {what}"
        assert error <= largest_error, f"bucket {i} of {what} is off by {error} units of the last place"


def reduce_sizes_and_dtypes(group_size: int | None) -> dict[Any, list[tuple[str, float]]]:
    small = [Bucket(numel, dtype, i) for i, (dtype, numel) in enumerate(product(DTYPES, SMALL))]
    large = [Bucket(LARGE, torch.float32, 99)]
    answers = {}
    for algorithm in usable_algorithms(topology(group_size)):
        for wire_dtype, shared_bytes in product((None, *DTYPES), (0, 5 * LARGE)):
            if algorithm == "ring" and shared_bytes:
                continue
            with engine(algorithm, group_size, wire_dtype=wire_dtype, shared_bytes=shared_bytes) as made:
                buckets = small + (large if wire_dtype in (None, torch.float16) else [])
                answers[algorithm, str(wire_dtype), shared_bytes] = reduce_all(made, buckets)
    return answers


@pytest.mark.parametrize(
    ("nodes", "group_size"),
    [((1, 1), None), ((2, 1), None), ((3,), None), ((2, 2), None), ((3, 1), 2), ((2, 1, 3), None)],
)
def test_means_of_all_sizes_and_dtypes(ranks: RankPool, nodes: tuple[int, ...], group_size: int | None) -> None:
    by_rank = ranks.run(reduce_sizes_and_dtypes, group_size, nodes=nodes, timeout=120)
    for case in by_rank[0]:
        # One rounding into the wire, one a sum, one out of it; the ring rounds at every hop.
        check([answers[case] for answers in by_rank], case, largest_error=2 + sum(nodes))


def reduce_on(node_of: list[int], group_size: int | None) -> dict[str, list[tuple[str, float]]]:
    answers = {}
    for algorithm, shared_bytes in product(("hierarchical", "torus"), (0, 5 * LARGE)):
        with engine(algorithm, group_size, node_of, shared_bytes=shared_bytes) as made:
            answers[f"{algorithm} {shared_bytes}"] = reduce_all(made, [Bucket(n, torch.float32, n) for n in SMALL])
    return answers


@pytest.mark.parametrize(("node_of", "group_size"), [([1, 1, 0, 0], None), ([0, 1, 0, 1], None), ([0, 1, 0, 1], 4)])
def test_nodes_in_any_order(ranks: RankPool, node_of: list[int], group_size: int | None) -> None:
    """mpirun sorts nodes by their names, and srun may deal ranks to nodes in turn."""
    by_rank = ranks.run(reduce_on, node_of, group_size, world=4)
    for case in by_rank[0]:
        check([answers[case] for answers in by_rank], case, largest_error=6)


def reduce_many(
    algorithm: str | None, memory: str, largest_sleep_s: float = 0.0, num_rounds: int = 1, seed: int = 0
) -> list[tuple[str, float]]:
    """30 buckets of 4 bytes to 1 MB a round, the same on all ranks, the large ones in pieces; `seed`: of the sleeps."""
    draw = random.Random(5)
    buckets = [Bucket(int(10 ** draw.uniform(0, 5.7)), torch.float32, i) for i in range(30)]
    own_draw = random.Random(f"{seed} {current_case().rank}")
    advance = Engine.advance

    def dawdle(self: Engine, *args: Any, **kwargs: Any) -> None:
        time.sleep(own_draw.uniform(0, largest_sleep_s))
        advance(self, *args, **kwargs)

    arguments: dict[str, Any] = {
        "none": {},
        "a step": {"shared_bytes": sum(4 * bucket.numel for bucket in buckets)},
        # Less than is under way: buckets wait for each other's place, or go by messages. Only results of another dtype
        # than the wire's are safe then: the others stay in shared memory.
        "scarce": {"shared_bytes": 1, "wire_dtype": torch.float16},
    }[memory]
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        if largest_sleep_s:
            patch.setattr(Engine, "advance", dawdle)
        with engine(algorithm, chunk_bytes=(16 if memory == "scarce" else 256) * 1024, **arguments) as made:
            chosen = {made.plan.table.choose(2 * bucket.numel) for bucket in buckets}
            assert chosen == ({algorithm} if algorithm else set(usable_algorithms(made.plan.topology)))
            for _ in range(num_rounds):
                answers += reduce_all(made, buckets)
    return answers


MEMORIES = ("none", "a step", "scarce")


@pytest.mark.parametrize("nodes", [(2, 2), (3, 1), (4,)])
def test_many_buckets_under_way_at_once(ranks: RankPool, nodes: tuple[int, ...]) -> None:
    algorithms = (None, "hierarchical") if nodes == (3, 1) else (None, "hierarchical", "torus")
    for arguments in product(algorithms, MEMORIES):
        answers = ranks.run(reduce_many, *arguments, num_rounds=2, nodes=nodes)
        check(answers, arguments, largest_error=6)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("nodes", [(2, 2), (2, 1)])
def test_no_deadlock_whatever_the_timing(ranks: RankPool, nodes: tuple[int, ...], memory: str) -> None:
    answers = ranks.run(reduce_many, None, memory, largest_sleep_s=0.005, num_rounds=2, nodes=nodes)
    check(answers, "dawdling ranks", largest_error=6)


def reduce_equal(value: float, dtype: torch.dtype, algorithm: str, **kwargs: Any) -> float:
    """The mean when every rank has the same value: the one that is farthest from it."""
    with engine(algorithm, wire_dtype=torch.float16, **kwargs) as made:
        mean = made.submit(torch.full((1001,), value, dtype=dtype), 0).wait()
        made.raise_error()
        return max(mean.double().tolist(), key=lambda found: abs(found - value))


def reduce_extremes(dtype: torch.dtype, values: Sequence[float]) -> list[tuple[str, float, float]]:
    return [
        (algorithm, value, reduce_equal(value, dtype, algorithm, shared_bytes=shared_bytes))
        for algorithm in usable_algorithms(topology())[1:]
        for value in values
        for shared_bytes in (0, 8192)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("nodes", [(1, 1), (3,), (2, 2)])
def test_whole_range_of_fp16_survives_our_own_sums(ranks: RankPool, nodes: tuple[int, ...], dtype: torch.dtype) -> None:
    for answers in ranks.run(reduce_extremes, dtype, [60000.0, LARGEST_FP16, SMALLEST_FP16], nodes=nodes):
        assert {algorithm for algorithm, _, _ in answers} == {"hierarchical", "torus"}
        for algorithm, value, found in answers:
            assert found == value, algorithm


def test_large_fp16_survives_unequal_groups(ranks: RankPool) -> None:
    for answers in ranks.run(reduce_extremes, torch.float32, [60000.0, LARGEST_FP16], nodes=(2, 1)):
        for algorithm, value, found in answers:
            assert found == pytest.approx(value, rel=2**-10), algorithm


@pytest.mark.parametrize(("world", "power"), [(2, 2), (3, 2), (4, 2), (6, 4)])
def test_range_of_fp16_in_the_ring(ranks: RankPool, world: int, power: int) -> None:
    # Divided by a power of two near sqrt(world) first, by the rest after the backend's sum in FP16.
    limit = torch.tensor(LARGEST_FP16 * power / world - 16).half().item()
    for value in (limit, power * SMALLEST_FP16):
        found = ranks.run(reduce_equal, value, torch.float32, "ring", world=world)
        assert found == pytest.approx([value] * world, rel=2**-10)


def test_predivide_moves_the_range_of_the_ring(ranks: RankPool) -> None:
    found = ranks.run(reduce_equal, LARGEST_FP16, torch.float32, "ring", predivide=4.0, world=4)
    assert found == pytest.approx([LARGEST_FP16] * 4, rel=2**-10)
    found = ranks.run(reduce_equal, SMALLEST_FP16, torch.float32, "ring", predivide=1.0, world=4)
    assert found == [SMALLEST_FP16] * 4


def reduce_in_own_process_namespace() -> list[tuple[str, float]]:
    """In containers ranks of a node can have equal process ids and descriptors: `/proc/1/fd/9` is then their own."""
    create = os.memfd_create

    def create_with_equal_number(name: str) -> int:
        descriptor = create(name)
        os.dup2(descriptor, 900)
        os.close(descriptor)
        return 900

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: "self")
        patch.setattr("os.memfd_create", create_with_equal_number)
        with engine("hierarchical", shared_bytes=8192) as made:
            patch.undo()
            return reduce_all(made, [Bucket(17, torch.float32, 0)])


def test_ranks_that_cannot_see_each_others_processes(ranks: RankPool) -> None:
    check(ranks.run(reduce_in_own_process_namespace, nodes=(1, 2)), "own namespaces", largest_error=5)


def threads_around_close() -> tuple[int, int]:
    def num_threads() -> int:
        return sum(thread.name.startswith("fourmin-") for thread in threading.enumerate())

    with engine("hierarchical") as made:
        made.submit(torch.ones(10), 0)
        before = num_threads()
    return before, num_threads()


def reduce_after_many_pieces(algorithm: str) -> list[float]:
    with engine(algorithm) as made:
        made._num_pieces = 2**31 - 1
        gradients = [torch.full((1001,), float(current_case().rank + step)) for step in range(3)]
        return [float(made.submit(one, 0).wait()[0]) for one in gradients]


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "torus"])
def test_tags_begin_again_before_gloo_has_no_more(ranks: RankPool, algorithm: str) -> None:
    assert ranks.run(reduce_after_many_pieces, algorithm, nodes=[2, 2]) == [[1.5, 2.5, 3.5]] * 4


def transfers_posted(num_buckets: int) -> int:
    """How many transfers the leader of the first node has posted between the nodes while the other node is silent."""
    posted = 0
    advance = Engine.advance

    def count(self: Engine, piece: Any, stage: str, is_first: bool) -> None:
        nonlocal posted
        advance(self, piece, stage, is_first)
        posted += stage == "scatter"

    store, rank = dist.PrefixStore("posted", dist.distributed_c10d._get_default_store()), current_case().rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "advance", count)
        with engine("hierarchical") as made:
            if rank == 2:
                store.wait(["counted"])
            futures = [made.submit(torch.ones(50_000), index) for index in range(num_buckets)]
            if rank == 0:
                deadline = time.monotonic() + 10
                while posted < num_buckets and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert not any(future.done() for future in futures)
                store.set("counted", "yes")
                return posted
            for future in futures:
                future.wait()
    return 0


def test_a_stage_keeps_several_transfers_posted(ranks: RankPool) -> None:
    """What latency costs is paid once for all that is in flight: the other node is late, and nobody waits to post."""
    assert ranks.run(transfers_posted, 4, nodes=(2, 2))[0] == 4


def test_close_ends_the_threads(ranks: RankPool) -> None:
    # A bucket is still under way when the engine closes.
    for before, after in ranks.run(threads_around_close, nodes=(2, 2)):
        assert before > 0
        assert after == 0
