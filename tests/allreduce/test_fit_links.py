"""Links from tables: what was put into a table is found again, and what does not fit is said."""

import random

import pytest

from lightning_fourmin.allreduce.algorithms import algorithm_of
from lightning_fourmin.allreduce.cost import DEFAULT_LINKS, Link, Links
from lightning_fourmin.allreduce.fit_links import fit_links
from lightning_fourmin.allreduce.table import AllReduceTable, Row
from lightning_fourmin.allreduce.topology import Topology

GLOO = DEFAULT_LINKS["gloo"]
LINKS = Links(Link(40e-6, 1 / 5e9), Link(60e-6, 1 / 2e9), Link(300e-6, 1 / 25e6), GLOO.reduce_s_per_byte)
SEVERAL = Topology.build([0, 0, 1, 1, 2, 2])
ONE = Topology.build([0, 0, 0])


def noisy(table: AllReduceTable, share: float) -> AllReduceTable:
    noise = random.Random(0)
    rows = [
        Row(row.num_bytes, {name: ms * (1 + share * noise.uniform(-1, 1)) for name, ms in row.milliseconds.items()})
        for row in table.rows
    ]
    return AllReduceTable(table.topology_key, table.backend, table.source, tuple(rows))


@pytest.mark.parametrize(
    ("topology", "fitted", "stated"),
    [
        (SEVERAL, ("inside", "between"), "inside_backend"),
        (ONE, ("inside", "inside_backend"), "between"),
        (Topology.build([0, 1, 2]), ("between",), "inside"),
        (Topology.build([0, 0, 0], group_size=1), ("inside_backend",), "inside"),
    ],
    ids=["nodes", "one node", "nodes of one rank", "groups of one rank"],
)
def test_links_of_a_cost_model_are_found_again(topology: Topology, fitted: tuple[str, ...], stated: str) -> None:
    found = fit_links(AllReduceTable.from_cost_model(topology, "gloo", LINKS), topology)
    assert found.fitted == fitted
    for name in fitted:
        there, here = getattr(found.links, name), getattr(LINKS, name)
        assert (there.latency_s, there.s_per_byte) == pytest.approx((here.latency_s, here.s_per_byte), rel=1e-6)
    assert getattr(found.links, stated) == getattr(GLOO, stated)
    assert found.median_error < 1e-6


def test_error_is_that_of_the_times() -> None:
    table = noisy(AllReduceTable.from_cost_model(SEVERAL, "gloo", LINKS), 0.2)
    found = fit_links(table, SEVERAL)
    assert 0.02 < found.median_error < 0.2
    assert found.links.between.s_per_byte == pytest.approx(LINKS.between.s_per_byte, rel=0.2)
    errors = [
        abs(1e3 * algorithm_of(name).seconds(row.num_bytes, SEVERAL, found.links) / ms - 1)
        for row in table.rows
        for name, ms in row.milliseconds.items()
    ]
    assert sorted(errors)[len(errors) // 2] == pytest.approx(found.median_error, rel=0.1)


def test_nothing_is_negative() -> None:
    """Times that fall with size, as noise makes them."""
    rows = [Row(n, {"ring": 9.0 / (i + 1), "hierarchical": 5.0, "torus": 4.0 + i}) for i, n in enumerate((256, 4096))]
    table = AllReduceTable(SEVERAL.key, "gloo", "made up", tuple(rows))
    found = fit_links(table, SEVERAL)
    for link in (found.links.inside, found.links.between):
        assert link.latency_s >= 0
        assert link.s_per_byte >= 0
    assert found.median_error > 0


def test_words() -> None:
    found = fit_links(AllReduceTable.from_cost_model(SEVERAL, "gloo", LINKS), SEVERAL)
    assert str(found) == ("inside 40 us a step and 5000 MB/s, between 300 us a step and 25 MB/s; off by 0% (median)")
