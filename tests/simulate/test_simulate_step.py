"""The simulated step: by hand, and what must hold for any model on any links."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fourmin.allreduce.algorithms import algorithm_of
from lightning_fourmin.allreduce.buckets import Bucket, FusionPlan
from lightning_fourmin.allreduce.cost import Link, Links
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.table import CHUNK_BYTES, AllReduceTable, Row
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.layer_profile import Gradient, Profile
from lightning_fourmin.simulate.step import CommCosts, Span, Step, simulate
from lightning_fourmin.simulate.stragglers import Stragglers, simulate_with

ALGORITHMS = ("ring", "hierarchical", "torus", "halving_doubling", "parameter_server")
MIB = 1024 * 1024


def profile(*gradients: tuple[int, float], forward_s: float = 1.0, update_s: float = 0.5) -> Profile:
    """A profile of gradients with these numbers of elements and ready times; backward ends with the last one."""
    named = tuple(Gradient(f"p{i}", 4 * numel, ready_s) for i, (numel, ready_s) in enumerate(gradients))
    return Profile(named, forward_s, gradients[-1][1], update_s, 8, "by hand")


def fusion(profile: Profile, *counts: int) -> FusionPlan:
    """Buckets of so many gradients each; by default every gradient has a bucket of its own."""
    gradients = list(profile.gradients)
    buckets = []
    for count in counts or [1] * len(gradients):
        taken, gradients = gradients[:count], gradients[count:]
        num_bytes = sum(one.num_bytes for one in taken)
        buckets.append(Bucket(tuple(one.name for one in taken), num_bytes, torch.float32))
    return FusionPlan(tuple(buckets), (), 0)


def only(algorithm: str, topology: Topology, chunk_bytes: int = CHUNK_BYTES) -> AllReduceTable:
    return AllReduceTable(topology.key, "gloo", "by hand", (Row(1, {algorithm: 1.0}),), chunk_bytes=chunk_bytes)


def links(latency_s: float, s_per_byte: float, inside: Link | None = None, num_nics: int = 1) -> Links:
    between = Link(latency_s, s_per_byte)
    return Links(inside or between, inside or between, between, 0.0, num_nics)


def nodes(num_nodes: int, ranks_per_node: int, group_size: int | None = None) -> Topology:
    return Topology.build([rank // ranks_per_node for rank in range(num_nodes * ranks_per_node)], group_size)


class Plan(NamedTuple):
    """A plan, and what communication costs on the cluster that carries it out."""

    comm: CommPlan
    comm_costs: CommCosts


def plan_on(
    fusion: FusionPlan,
    table: AllReduceTable,
    topology: Topology,
    links: Links,
    wire_dtype: torch.dtype | None = None,
    host: Link | None = None,
) -> Plan:
    return Plan(CommPlan(topology, table, wire_dtype, fusion=fusion), CommCosts(links, host))


def lane(step: Step, name: str) -> list[Span]:
    return [span for span in step.spans if span.lane == name]


# By hand.


def test_units() -> None:
    """10^9 bytes at 1 GB/s between two ranks: each sends and gets half of them twice, one second in all."""
    topology = nodes(2, 1)
    made = profile((250_000_000, 0.0), forward_s=0.0, update_s=0.0)
    step = simulate(made, *plan_on(fusion(made), only("ring", topology), topology, links(0.0, 1e-9)))
    assert step.step_s == pytest.approx(1.0)
    # As FP16 half of them travel.
    halved = plan_on(fusion(made), only("ring", topology), topology, links(0.0, 1e-9), wire_dtype=torch.float16)
    assert simulate(made, *halved).step_s == pytest.approx(0.5)
    assert simulate(made, halved.comm, CommCosts(links(0.25, 1e-9))).step_s == pytest.approx(2 * 0.25 + 0.5)


def test_overlap_and_queue_by_hand() -> None:
    """Three rings of 2 s: ready 1, 2 and 6 s into backward, which starts at 1 s; the wire is free at 4 and 6 s."""
    topology = nodes(2, 1)
    made = profile((1, 1.0), (1, 2.0), (1, 6.0))
    step = simulate(made, *plan_on(fusion(made), only("ring", topology), topology, links(1.0, 0.0)))
    assert [(span.start_s, span.end_s) for span in lane(step, "scatter")] == [(2, 4), (4, 6), (7, 9)]
    assert [(s.name, s.start_s, s.end_s) for s in lane(step, "main")] == [
        ("forward", 0, 1),
        ("backward", 1, 7),
        ("optimizer step", 9, 9.5),
    ]
    assert (step.step_s, step.compute_s, step.exposed_s) == (9.5, 7.5, 2.0)
    # Under way from 2 to 6 and from 7 to 9.
    assert step.comm_s == 6


def test_bucket_waits_for_its_last_gradient_and_for_the_bucket_before_it() -> None:
    topology = nodes(2, 1)
    made = profile((1, 1.0), (1, 2.0), (1, 3.0))
    plan = plan_on(fusion(made, 2, 1), only("ring", topology), topology, links(0.1, 0.0))
    assert [span.start_s for span in lane(simulate(made, *plan), "scatter")] == pytest.approx([3.0, 4.0])
    # Buckets cut in another order than that of readiness: the first holds the second up.
    early, late = plan.comm.fusion.buckets
    turned = Plan(replace(plan.comm, fusion=FusionPlan((late, early), (), 0)), plan.comm_costs)
    assert [span.start_s for span in lane(simulate(made, *turned), "scatter")] == pytest.approx([4.0, 4.2])


def test_pieces_pass_the_stages_one_behind_the_other() -> None:
    """2 nodes of 2, 2 pieces. Inside 2 s a phase (2 steps of 1 s), between 2 s: the second piece follows on each link,
    and the first one's broadcast finds the link inside free when the second has been reduced."""
    topology = nodes(2, 2)
    made = profile((2, 0.0), forward_s=0.0, update_s=0.0)
    table = only("hierarchical", topology, chunk_bytes=4)
    plan = plan_on(fusion(made), table, topology, links(1.0, 0.0, Link(1.0, 0.0)))
    step = simulate(made, *plan)
    assert [(s.start_s, s.end_s) for s in lane(step, "reduce")] == [(0, 2), (2, 4)]
    assert [(s.start_s, s.end_s) for s in lane(step, "scatter")] == [(2, 4), (4, 6)]
    assert [(s.start_s, s.end_s) for s in lane(step, "broadcast")] == [(4, 6), (6, 8)]


def test_broadcasts_give_way_to_reduces() -> None:
    """The broadcast of the first bucket is ready at 6 s, and is interrupted by the second bucket's reduce at 7 s."""
    topology = nodes(2, 2)
    made = profile((1, 0.0), (1, 7.0), forward_s=0.0, update_s=0.0)
    made_links = links(2.0, 0.0, Link(1.0, 0.0))
    step = simulate(made, *plan_on(fusion(made), only("hierarchical", topology), topology, made_links))
    assert [(s.start_s, s.end_s) for s in lane(step, "reduce")] == [(0, 2), (7, 9)]
    assert [(s.start_s, s.end_s) for s in lane(step, "broadcast")] == [(6, 10), (13, 15)]


def test_cores_that_serve_communication_compute_more_slowly() -> None:
    """A ring from 2 to 6 s takes half of the cores, so 1 s of backward after 2 s takes 2; the next ring comes later."""
    topology = nodes(2, 1)
    made = profile((1, 1.0), (1, 2.0), (1, 8.0))
    plan = plan_on(fusion(made, 1, 1, 1), only("ring", topology), topology, links(2.0, 0.0), host=Link(2.0, 0.0))
    step = simulate(made, *plan)
    assert [(s.start_s, s.end_s) for s in lane(step, "scatter")] == [(2, 6), (6, 10), (13, 17)]
    # 7 s of work are left at 2 s: 4 are done when the wire falls silent at 10 s.
    assert [(s.name, s.end_s) for s in lane(step, "main")] == [
        ("forward", 1),
        ("backward", 13),
        ("optimizer step", 17.5),
    ]
    # Communication that needs the cores all the time halts compute: 4 s for each of the two rings before the end.
    halted = simulate(made, plan.comm, replace(plan.comm_costs, host=Link(99.0, 0.0)))
    assert [s.end_s for s in lane(halted, "main")][1] == 9 + 2 * 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("topology", [nodes(4, 4), nodes(4, 4, 2), nodes(4, 4, 8), nodes(1, 8)], ids=str)
def test_one_bucket_in_one_piece_takes_what_the_cost_model_says(algorithm: str, topology: Topology) -> None:
    made = profile((300_000, 0.0), forward_s=0.0, update_s=0.0)
    made_links = Links(Link(1e-5, 1e-10), Link(3e-5, 3e-10), Link(2e-4, 5e-9), 7e-11, 2)
    plan = plan_on(fusion(made), only(algorithm, topology, chunk_bytes=1 << 40), topology, made_links)
    assert simulate(made, *plan).step_s == pytest.approx(
        algorithm_of(algorithm).seconds(1_200_000, topology, made_links)
    )


# Whatever the model and the links.

SECONDS = st.floats(0, 0.1)
RATES = st.floats(1e-12, 1e-7)
PROFILES = st.lists(st.tuples(st.integers(1, 2_000_000), SECONDS), min_size=1, max_size=8).map(
    lambda rows: profile(*sorted(rows, key=lambda row: row[1]), forward_s=0.02, update_s=0.005)
)
TOPOLOGIES = st.builds(nodes, st.integers(1, 6), st.integers(1, 4), st.sampled_from([None, 1, 2, 8]))
LINKS = st.builds(
    lambda a1, b1, a2, b2, g, nics: Links(Link(a1, b1), Link(a1, b1), Link(a2, b2), g, nics),
    SECONDS,
    RATES,
    SECONDS,
    RATES,
    st.floats(0, 1e-9),
    st.integers(1, 8),
)


def simulated(made: Profile, topology: Topology, given_links: Links, algorithm: str, itemsize: int = 4) -> Step:
    plan = plan_on(
        fusion(made), only(algorithm, topology), topology, given_links, torch.float16 if itemsize == 2 else None
    )
    return simulate(made, *plan)


@given(PROFILES, TOPOLOGIES, LINKS, st.sampled_from(ALGORITHMS), st.floats(1, 100), st.floats(1, 100))
def test_faster_links_are_never_slower(
    made: Profile, topology: Topology, slow: Links, algorithm: str, faster: float, sooner: float
) -> None:
    before_s = simulated(made, topology, slow, algorithm).step_s

    def better(link: Link) -> Link:
        return Link(link.latency_s / sooner, link.s_per_byte / faster)

    for fast in (
        replace(slow, inside=better(slow.inside)),
        replace(slow, between=better(slow.between)),
        replace(slow, inside=better(slow.inside), inside_backend=better(slow.inside), between=better(slow.between)),
        replace(slow, num_nics=slow.num_nics + 1),
    ):
        assert simulated(made, topology, fast, algorithm).step_s <= before_s * (1 + 1e-9)


@given(PROFILES, TOPOLOGIES, LINKS, st.sampled_from(ALGORITHMS), st.sampled_from([2, 4]))
def test_lower_bounds_and_bookkeeping(
    made: Profile, topology: Topology, given_links: Links, algorithm: str, itemsize: int
) -> None:
    """PAPER 4.1: 2(p-1)/p * n / B, where B is all that a rank's links carry together."""
    step = simulated(made, topology, given_links, algorithm, itemsize)
    p, n = topology.world_size, sum(one.num_bytes for one in made.gradients) * itemsize // 4
    rate = 1 / given_links.inside.s_per_byte + given_links.num_nics / given_links.between.s_per_byte
    assert step.comm_s >= 2 * (p - 1) / p * n / rate * (1 - 1e-9)
    assert step.step_s >= made.compute_s * (1 - 1e-12)
    assert step.exposed_s <= step.comm_s + 1e-12
    spans = [span for span in step.spans if span.lane != "main"]
    assert bool(spans) == (p > 1)
    for stage in ("reduce", "scatter"):
        ordered = lane(step, stage)
        assert all(one.end_s <= other.start_s for one, other in pairwise(ordered))
    carried = sum(int(str(span.details["bytes"])) for span in spans if span.lane == "scatter")
    assert carried == (n if p > 1 else 0)


@given(PROFILES, LINKS, st.sampled_from(ALGORITHMS))
def test_one_rank_does_not_communicate(made: Profile, given_links: Links, algorithm: str) -> None:
    step = simulated(made, nodes(1, 1), given_links, algorithm)
    assert step.step_s == pytest.approx(made.compute_s)
    assert (step.comm_s, len(step.spans)) == (0.0, 3)


# Costs that the table of the strategy does not need.


def test_halving_doubling_costs_what_the_paper_says() -> None:
    topology, n = nodes(8, 1), 1_000_000
    made = Links(Link(0, 0), Link(0, 0), Link(2e-5, 3e-9), 1e-10)
    expected = 2 * 3 * 2e-5 + 2 * 7 / 8 * n * 3e-9 + 7 / 8 * n * 1e-10
    assert algorithm_of("halving_doubling").seconds(n, topology, made) == pytest.approx(expected)
    # Two ranks more: they hand their gradients over first and get the sums last.
    more = expected + 2 * 2e-5 + 2 * n * 3e-9 + n * 1e-10
    assert algorithm_of("halving_doubling").seconds(n, nodes(10, 1), made) == pytest.approx(more)


def test_parameter_server_takes_in_every_gradient() -> None:
    made = Links(Link(0, 0), Link(0, 0), Link(2e-5, 3e-9), 1e-10)
    assert algorithm_of("parameter_server").seconds(1000, nodes(5, 1), made) == pytest.approx(
        2 * 2e-5 + 2 * 4 * 1000 * 3e-9 + 4 * 1000 * 1e-10
    )


def test_ranks_of_a_node_queue_for_its_nics() -> None:
    """2 nodes of 4: the torus sends 4 quarters at once, through one NIC, two or four."""
    costs = {
        nics: algorithm_of("torus").costs(4000, nodes(2, 4), links(1e-5, 1e-9, num_nics=nics))[1]
        for nics in (1, 2, 4, 8)
    }
    assert [costs[nics].transfer_s for nics in costs] == pytest.approx([4e-6, 2e-6, 1e-6, 1e-6])
    assert [costs[nics].latency_s for nics in costs] == pytest.approx([8e-5, 4e-5, 2e-5, 2e-5])
    # A leader uses one NIC; two leaders on a node share it.
    one, two = (algorithm_of("hierarchical").costs(4000, nodes(2, 4, k), links(0.0, 1e-9))[1] for k in (4, 2))
    assert (one.transfer_s, two.transfer_s) == pytest.approx((4e-6, 2 * 2 * 3 / 4 * 4e-6))


def test_a_group_over_several_nodes_pays_the_link_between_them() -> None:
    made = Links(Link(1e-6, 0), Link(1e-6, 0), Link(1e-4, 0), 0.0)
    inside, over = (algorithm_of("hierarchical").costs(1, nodes(4, 2, k), made)[0].latency_s for k in (2, 4))
    assert (inside, over) == pytest.approx((2 * 1e-6, 2 * 3 * 1e-4))


# Slow ranks.


def test_paces_are_those_of_the_slowest_of_all_ranks() -> None:
    """The mean pace is that of the last awaited rank where the pace of every rank is drawn."""
    stragglers = Stragglers(jitter=0.1, probability=0.02, slowdown=3.0, num_backups=2, seed=1)
    num_ranks, num_steps = 16, 4000
    torch.manual_seed(0)
    drawn = torch.normal(1.0, 0.1, (num_steps, num_ranks))
    drawn *= torch.where(torch.rand(num_steps, num_ranks) < 0.02, 3.0, 1.0)
    for backups in (0, 2):
        paces = replace(stragglers, num_backups=backups).paces(num_ranks, num_steps)
        awaited = drawn.sort(1).values[:, num_ranks - 1 - backups]
        assert sum(paces) / num_steps == pytest.approx(float(awaited.mean()), rel=0.02)


def test_stragglers_are_waited_for_unless_there_are_backups() -> None:
    topology = nodes(4, 8)
    made = profile((1000, 1.0), forward_s=0.5)
    plan = plan_on(fusion(made), only("ring", topology), topology, links(1e-5, 1e-9))
    alone = simulate(made, *plan)
    assert simulate_with(Stragglers(), made, *plan) == alone
    slow = Stragglers(probability=0.05, slowdown=2.0)
    waiting, helped = (simulate_with(replace(slow, num_backups=n), made, *plan) for n in (0, 8))
    assert alone.step_s <= helped.step_s < waiting.step_s
    assert waiting.compute_s == made.compute_s
    assert simulate_with(slow, made, *plan) == waiting
    assert simulate_with(replace(slow, seed=7), made, *plan) != waiting
    alone_in_world = replace(plan.comm, topology=nodes(1, 1))
    assert simulate_with(slow, made, alone_in_world, plan.comm_costs).step_s == pytest.approx(made.compute_s)


def test_impossible_stragglers() -> None:
    with pytest.raises(PlanError, match=r"stragglers: jitter=-1 .* must be 0 or more, probability=0.0 between 0 and 1"):
        Stragglers(jitter=-1)
    with pytest.raises(PlanError, match="num_backups=4 leaves no rank of 4 to wait for"):
        Stragglers(jitter=0.1, num_backups=4).paces(4)
