"""The table that decides: cost models, choices between rows, the CSV file and what is refused."""

import math
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fourmin.allreduce.algorithms import algorithm_of
from lightning_fourmin.allreduce.cost import DEFAULT_LINKS, Link, Links
from lightning_fourmin.allreduce.table import (
    SIZES,
    SWITCH_GAIN,
    AllReduceTable,
    Row,
    cached_table_path,
    default_fusion_mb,
    read_table,
    write_table,
)
from lightning_fourmin.allreduce.topology import Topology

TWO_NODES = Topology.build([0, 0, 1, 1])
UNEQUAL = Topology.build([0, 0, 0, 1])
# Round numbers that no two terms share, so that a wrong term shows.
A1, B1, A0, B0, A2, B2, G = 3e-6, 5e-10, 2e-5, 17e-10, 7e-5, 11e-9, 13e-11
LINKS = Links(inside=Link(A1, B1), inside_backend=Link(A0, B0), between=Link(A2, B2), reduce_s_per_byte=G)
WITHOUT_SUMS = replace(LINKS, reduce_s_per_byte=0.0)

HEAD = "# topology_key: nodes2x2_groups2x2\n# backend: gloo\n# source: measured by hand\n"
COLUMNS = "bytes,ring_ms,hierarchical_ms,choice\n"


def table(*rows: tuple[int, dict[str, float]], topology: Topology = TWO_NODES) -> AllReduceTable:
    return AllReduceTable(topology.key, "gloo", "measured by hand", tuple(Row(n, ms) for n, ms in rows))


def crossing_table() -> AllReduceTable:
    """Hierarchical at first, then torus, then ring."""
    return table(
        (1024, {"ring": 4.0, "hierarchical": 1.0, "torus": 2.0}),
        (65536, {"ring": 6.0, "hierarchical": 3.0, "torus": 4.0}),
        (1 << 20, {"ring": 9.0, "hierarchical": 12.0, "torus": 8.0}),
        (8 << 20, {"ring": 40.0, "hierarchical": 90.0, "torus": 50.0}),
    )


# Cost models, PAPER 4.1: p ranks in q groups of k, n bytes.


@pytest.mark.parametrize("n", [1, 4096, 30_000_000])
def test_ring_costs_what_the_paper_says(n: int) -> None:
    seconds = algorithm_of("ring").seconds(n, Topology.build([0, 0, 1, 1, 2, 2]), LINKS)
    assert seconds == pytest.approx(2 * 5 * A2 + 2 * 5 / 6 * n * B2 + 5 / 6 * n * G, rel=1e-12)


def test_ring_inside_one_node_uses_the_link_of_the_backend() -> None:
    n = 1_000_000
    seconds = algorithm_of("ring").seconds(n, Topology.build([0, 0, 0]), LINKS)
    assert seconds == pytest.approx(2 * 2 * A0 + 2 * 2 / 3 * n * B0 + 2 / 3 * n * G, rel=1e-12)


@pytest.mark.parametrize("n", [1, 4096, 30_000_000])
def test_hierarchical_costs_what_the_paper_says(n: int) -> None:
    """3 groups of 4."""
    seconds = algorithm_of("hierarchical").seconds(n, Topology.build([0] * 4 + [1] * 4 + [2] * 4), LINKS)
    inside = 4 * 3 * A1 + 4 * 3 / 4 * n * B1
    between = 2 * 2 * A2 + 2 * 2 / 3 * n * B2
    assert seconds == pytest.approx(inside + between + (3 / 4 + 2 / 3) * n * G, rel=1e-12)


def test_hierarchical_waits_for_the_largest_group() -> None:
    n = 1_000_000
    seconds = algorithm_of("hierarchical").seconds(n, UNEQUAL, LINKS)
    inside = 4 * 2 * A1 + 4 * 2 / 3 * n * B1
    between = 2 * 1 * A2 + 2 * 1 / 2 * n * B2
    assert seconds == pytest.approx(inside + between + (2 / 3 + 1 / 2) * n * G, rel=1e-12)


@pytest.mark.parametrize("n", [1, 4096, 30_000_000])
def test_torus_costs_what_the_paper_says_with_a_shared_link(n: int) -> None:
    """3 groups of 4: n / k bytes at b2' = k * b2, and the messages of k ranks queue at the node's link."""
    seconds = algorithm_of("torus").seconds(n, Topology.build([0] * 4 + [1] * 4 + [2] * 4), WITHOUT_SUMS)
    inside = 2 * 3 * A1 + 2 * 3 / 4 * n * B1
    between = 4 * 2 * 2 * A2 + 2 * 2 / 3 * (n / 4) * (4 * B2)
    assert seconds == pytest.approx(inside + between, rel=1e-12)


def test_torus_shares_the_sums_between_the_ranks_of_a_group() -> None:
    """A rank sums 3 foreign parts of n / 4 inside its group of 4, then 2 of n / 4 / 3 between 3 groups."""
    n, topology = 1_000_000, Topology.build([0] * 4 + [1] * 4 + [2] * 4)
    sums_s = algorithm_of("torus").seconds(n, topology, LINKS) - algorithm_of("torus").seconds(
        n, topology, WITHOUT_SUMS
    )
    assert sums_s == pytest.approx((3 * n / 4 + 2 * n / 4 / 3) * G, rel=1e-6)


def test_one_rank_costs_nothing() -> None:
    for algorithm in ("ring", "hierarchical", "torus"):
        assert algorithm_of(algorithm).seconds(1 << 20, Topology.build([0]), LINKS) == 0


def test_no_cost_model_for_an_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="algorithm='butterfly' is not known"):
        algorithm_of("butterfly").seconds(1, TWO_NODES, LINKS)


def test_cost_model_table_holds_the_milliseconds_of_the_cost_model() -> None:
    made = AllReduceTable.from_cost_model(TWO_NODES, "gloo", LINKS)
    assert (made.topology_key, made.backend, made.source) == (TWO_NODES.key, "gloo", "cost model")
    assert [row.num_bytes for row in made.rows] == list(SIZES)
    assert (SIZES[0], SIZES[-1]) == (256, 64 * 1024 * 1024)
    for row in made.rows:
        assert list(row.milliseconds) == ["ring", "hierarchical", "torus"]
        for algorithm, ms in row.milliseconds.items():
            assert ms == pytest.approx(1e3 * algorithm_of(algorithm).seconds(row.num_bytes, TWO_NODES, LINKS))


def test_cost_model_has_the_links_of_its_backend() -> None:
    for backend, links in DEFAULT_LINKS.items():
        expected = AllReduceTable.from_cost_model(TWO_NODES, backend, links)
        assert AllReduceTable.from_cost_model(TWO_NODES, backend) == expected
    assert (
        AllReduceTable.from_cost_model(TWO_NODES, "mpi").rows == AllReduceTable.from_cost_model(TWO_NODES, "gloo").rows
    )


def test_unequal_groups_have_no_torus() -> None:
    made = AllReduceTable.from_cost_model(UNEQUAL, "gloo")
    assert list(made.rows[0].milliseconds) == ["ring", "hierarchical"]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_one_node_with_one_kind_of_link_is_always_a_ring(world: int) -> None:
    made = AllReduceTable.from_cost_model(Topology.build([0] * world), "nccl")
    assert made.algorithms == ("ring",)
    assert made.summary() == "ring"
    assert {made.choose(n) for n in (1, 300, 1 << 20, 1 << 40)} == {"ring"}


def test_one_node_with_a_faster_link_than_the_backend_has_uses_it() -> None:
    made = AllReduceTable.from_cost_model(Topology.build([0] * 4), "gloo", LINKS)
    assert {made.choose(n) for n in SIZES} == {"torus"}


def test_small_messages_go_in_fewer_steps_on_many_ranks() -> None:
    """The paper's reason for the hybrid: 2046 steps of a flat ring against 186."""
    made = AllReduceTable.from_cost_model(Topology.build([rank // 16 for rank in range(1024)]), "nccl")
    assert made.choose(1024) == "hierarchical"
    assert made.rows[0].milliseconds["ring"] > 5 * made.rows[0].milliseconds["hierarchical"]


@pytest.mark.parametrize(("num_nodes", "chunk_bytes"), [(1, 1 << 20), (4, 1 << 20), (16, 4 << 20), (1000, 64 << 20)])
def test_pieces_grow_with_the_latencies_that_each_of_them_pays(num_nodes: int, chunk_bytes: int) -> None:
    links = Links(Link(0.0, 0.0), Link(0.0, 0.0), between=Link(1e-5, 1e-10), reduce_s_per_byte=0.0)
    made = AllReduceTable.from_cost_model(Topology.build(list(range(num_nodes))), "gloo", links)
    assert made.chunk_bytes == chunk_bytes
    # A ring over q nodes has q latencies to pay for each whole transfer of the bytes.
    assert num_nodes == 1 or chunk_bytes == SIZES[-1] or num_nodes * 1e-5 <= 0.5 * chunk_bytes * 1e-10


def test_default_fusion_is_two_pieces_up_to_a_limit() -> None:
    assert default_fusion_mb(TWO_NODES, "gloo") == 2.0
    assert default_fusion_mb(Topology.build([rank // 8 for rank in range(2048)]), "nccl") == 32.0


# Choices.


def test_choice_at_and_between_rows() -> None:
    crossing = crossing_table()
    assert [crossing.choose(row.num_bytes) for row in crossing.rows] == [row.best for row in crossing.rows]
    # Between 64 KiB and 1 MiB hierarchical grows by 9 ms, torus by 4 from 1 ms more: they meet after 1/5 of the way.
    meet = 65536 + ((1 << 20) - 65536) // 5
    assert crossing.choose(meet - 10) == "hierarchical"
    assert crossing.choose(meet + 10) == "torus"


def test_expected_ms_between_below_and_above_the_rows() -> None:
    crossing = crossing_table()
    halfway = crossing.expected_ms((1024 + 65536) // 2)
    assert halfway == pytest.approx({"ring": 5.0, "hierarchical": 2.0, "torus": 3.0})
    assert crossing.expected_ms(1) == crossing.rows[0].milliseconds
    assert crossing.expected_ms(16 << 20) == pytest.approx({"ring": 80.0, "hierarchical": 180.0, "torus": 100.0})


def test_tie_goes_to_the_simplest() -> None:
    assert table((1024, {"ring": 1.0, "hierarchical": 1.0, "torus": 1.0})).choose(1024) == "ring"


@given(
    times=st.lists(st.tuples(*[st.floats(0.001, 1000)] * 3), min_size=1, max_size=6),
    num_bytes=st.integers(1, 1 << 34),
)
def test_choice_is_the_fastest_of_the_algorithms_that_win_somewhere(
    times: list[tuple[float, float, float]], num_bytes: int
) -> None:
    made = table(
        *[(256 * 4**i, dict(zip(("ring", "hierarchical", "torus"), ms, strict=True))) for i, ms in enumerate(times)]
    )
    assert set(made.algorithms) == {row.best for row in made.rows}
    expected = made.expected_ms(num_bytes)
    assert expected[made.choose(num_bytes)] == min(expected[name] for name in made.algorithms)


@pytest.mark.parametrize(
    ("ring", "hierarchical", "choices"),
    [
        # Chance: each is a little faster here and there; in sum hierarchical is.
        ([1.0, 1.0, 1.05, 1.0], [1.03, 0.98, 1.0, 0.98], ["hierarchical"] * 4),
        # Once, but clearly.
        ([1.0, 1.0, 1.0, 1.0], [1.3, 0.5, 1.3, 1.3], ["ring", "hierarchical", "ring", "ring"]),
        # A little, but at several sizes in a row.
        ([1.0, 1.0, 1.0, 2.0, 2.0], [1.1, 1.1, 1.1, 1.9, 1.0], ["ring"] * 3 + ["hierarchical"] * 2),
    ],
)
def test_measured_tables_switch_only_where_it_pays(
    ring: list[float], hierarchical: list[float], choices: list[str]
) -> None:
    rows = []
    for i, (one, other) in enumerate(zip(ring, hierarchical, strict=True)):
        times = {"ring": one, "hierarchical": other}
        rows.append(Row(256 * 4**i, times, {name: (ms, ms) for name, ms in times.items()}))
    made = AllReduceTable(TWO_NODES.key, "gloo", "measured", tuple(rows))
    assert [made.choose(row.num_bytes) for row in rows] == choices
    assert made.choose(rows[-1].num_bytes * 100) == choices[-1]
    assert set(made.algorithms) == set(choices)


@given(st.lists(st.tuples(*[st.floats(0.5, 2.0)] * 3), min_size=1, max_size=5))
def test_choices_of_measured_tables_against_all_others(times: list[tuple[float, ...]]) -> None:
    names = ("ring", "hierarchical", "torus")
    by_name = [dict(zip(names, ms, strict=True)) for ms in times]
    rows = [Row(256 * 4**i, ms, {name: (ms[name], ms[name]) for name in names}) for i, ms in enumerate(by_name)]
    made = AllReduceTable(TWO_NODES.key, "gloo", "measured", tuple(rows))

    def cost(choices: tuple[str, ...]) -> float:
        switches = sum(before != after for before, after in pairwise(choices))
        return SWITCH_GAIN * switches + sum(math.log(ms[name]) for ms, name in zip(by_name, choices, strict=True))

    found = cost(tuple(made.choose(row.num_bytes) for row in rows))
    assert found == pytest.approx(min(map(cost, product(names, repeat=len(rows)))))


def test_switch_is_hierarchical_up_to_and_with_its_size() -> None:
    switched = crossing_table().with_switch(1000)
    assert [switched.choose(n) for n in (1, 1000, 1001, 1 << 30)] == ["hierarchical", "hierarchical", "ring", "ring"]
    assert set(switched.algorithms) == {"ring", "hierarchical"}
    assert crossing_table().switch_bytes is None


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "torus"])
def test_only_leaves_one_algorithm_and_its_milliseconds(algorithm: str) -> None:
    crossing = crossing_table()
    alone = crossing.only(algorithm)
    assert alone.algorithms == (algorithm,)
    assert {alone.choose(n) for n in (1, 70_000, 1 << 30)} == {algorithm}
    assert alone.summary() == algorithm
    for row, whole in zip(alone.rows, crossing.rows, strict=True):
        assert row.milliseconds == {algorithm: whole.milliseconds[algorithm]}


def test_only_torus_on_unequal_groups() -> None:
    made = AllReduceTable.from_cost_model(UNEQUAL, "gloo")
    with pytest.raises(ValueError, match=r"algorithm='torus'.*nodes1x3\+1x1.*ring, hierarchical.*choose a group_size"):
        made.only("torus")


# What people read.


def test_summary_says_up_to_which_size() -> None:
    table = crossing_table()
    assert table.summary() == "hierarchical up to 256 KiB, torus up to 1.636 MiB, ring above"
    for size, below, above in table.switch_points():
        assert (table.choose(size - 1), table.choose(size)) == (below, above)


def test_two_switches_between_two_rows() -> None:
    rows = (
        Row(100, {"ring": 9.0, "hierarchical": 3.0, "torus": 1.0}),
        Row(1000, {"ring": 5.0, "hierarchical": 1.0, "torus": 2.0}),
        Row(9000, {"ring": 6.0, "hierarchical": 17.0, "torus": 8.0}),
    )
    sizes, below, above = zip(*replace(crossing_table(), rows=rows).switch_points(), strict=True)
    # 1 + 2k = 2 + 0.75k at k = 0.8, 2 + 0.75k = 5 + 0.125k at k = 4.8, of 1000 bytes each.
    assert sizes == pytest.approx((700, 1800, 5800), abs=1)
    assert (below, above) == (("torus", "hierarchical", "torus"), ("hierarchical", "torus", "ring"))


@pytest.mark.parametrize(
    ("switch_bytes", "size"),
    [(512, "512 B"), (2048, "2 KiB"), (3 << 19, "1.5 MiB"), (64 << 20, "64 MiB"), (2 << 30, "2 GiB")],
)
def test_summary_of_a_switch(switch_bytes: int, size: str) -> None:
    assert crossing_table().with_switch(switch_bytes).summary() == f"hierarchical up to {size}, ring above"


def test_text_shows_milliseconds_and_choice_of_each_row() -> None:
    first, columns, *rows = str(crossing_table()).splitlines()
    assert first == "all-reduce table for nodes2x2_groups2x2 on gloo (measured by hand)"
    assert columns.split() == ["bytes", "ring", "ms", "hierarchical", "ms", "torus", "ms", "choice"]
    assert [row.split() for row in rows] == [
        ["1,024", "4.000", "1.000", "2.000", "hierarchical"],
        ["65,536", "6.000", "3.000", "4.000", "hierarchical"],
        ["1,048,576", "9.000", "12.000", "8.000", "torus"],
        ["8,388,608", "40.000", "90.000", "50.000", "ring"],
    ]


def test_text_of_a_switch_shows_what_it_chooses() -> None:
    lines = str(crossing_table().with_switch(70_000)).splitlines()
    assert lines[1] == "switch_mb given: hierarchical up to 70,000 bytes, ring above"
    assert [line.split()[-1] for line in lines[3:]] == ["hierarchical", "hierarchical", "ring", "ring"]


# The CSV file.


def test_csv_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "directory" / "table.csv"
    write_table(crossing_table(), path)
    assert read_table(path, TWO_NODES, "gloo") == crossing_table()
    assert [file.name for file in path.parent.iterdir()] == ["table.csv"]


@pytest.mark.parametrize("topology", [TWO_NODES, UNEQUAL, Topology.build([r // 8 for r in range(256)])], ids=str)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_csv_round_trip_keeps_the_choices_of_the_cost_model(tmp_path: Path, topology: Topology, backend: str) -> None:
    made = AllReduceTable.from_cost_model(topology, backend)
    write_table(made, tmp_path / "table.csv")
    read = read_table(tmp_path / "table.csv", topology, backend)
    assert read.algorithms == made.algorithms
    for n in (1, *SIZES, *(3 * size for size in SIZES)):
        assert read.choose(n) == made.choose(n)
        assert read.expected_ms(n) == pytest.approx(made.expected_ms(n), rel=1e-5)


def test_csv_replaces_an_older_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_table(crossing_table(), path)
    write_table(crossing_table().only("ring"), path)
    assert read_table(path, TWO_NODES, "gloo") == crossing_table().only("ring")


def test_csv_is_for_people_too(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_table(crossing_table(), path)
    assert path.read_text().splitlines()[:6] == [
        "# topology_key: nodes2x2_groups2x2",
        "# backend: gloo",
        "# source: measured by hand",
        "# chunk_bytes: 1048576",
        "bytes,ring_ms,hierarchical_ms,torus_ms,choice",
        "1024,4,1,2,hierarchical",
    ]


BROKEN = {
    "empty file": ("", "topology_key"),
    "other text": ("no table\nat all\n", ""),
    "no head": (COLUMNS + "256,1,2,ring\n", "topology_key"),
    "no backend": (HEAD.replace("# backend: gloo\n", "") + COLUMNS + "256,1,2,ring\n", "backend"),
    "head only": (HEAD, "no rows"),
    "no rows": (HEAD + COLUMNS, "no rows"),
    "no sizes": (HEAD + "ring_ms,choice\n1,ring\n", "bytes"),
    "no algorithms": (HEAD + "bytes,choice\n256,ring\n", "algorithms are"),
    "unknown algorithm": (HEAD + "bytes,butterfly_ms,choice\n256,1,butterfly\n", "algorithms are .*butterfly"),
    "falling sizes": (HEAD + COLUMNS + "1024,1,2,ring\n256,1,2,ring\n", "sizes"),
    "size twice": (HEAD + COLUMNS + "256,1,2,ring\n256,1,2,ring\n", "sizes"),
    "size in words": (HEAD + COLUMNS + "many,1,2,ring\n", "many"),
    "broken size": (HEAD + COLUMNS + "2.5,1,2,ring\n", "2.5"),
    "size 0": (HEAD + COLUMNS + "0,1,2,ring\n", "sizes"),
    "negative size": (HEAD + COLUMNS + "-256,1,2,ring\n", "sizes"),
    "no chunks": (HEAD + "# chunk_bytes: 0\n" + COLUMNS + "256,1,2,ring\n", "chunk_bytes must be at least 1"),
    "time in words": (HEAD + COLUMNS + "256,fast,2,ring\n", "fast"),
    "no time": (HEAD + COLUMNS + "256,,2,ring\n", ""),
    "time 0": (HEAD + COLUMNS + "256,0,2,ring\n", "positive"),
    "negative time": (HEAD + COLUMNS + "256,-1,2,ring\n", "positive"),
    "time nan": (HEAD + COLUMNS + "256,nan,2,ring\n", "positive"),
    "time inf": (HEAD + COLUMNS + "256,inf,2,ring\n", "positive"),
    "short row": (HEAD + COLUMNS + "256,1\n", ""),
    "long row": (HEAD + COLUMNS + "256,1,2,ring,7\n", ""),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_csv_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(text)
    message = rf"table='.*broken.csv' is not an all-reduce table .*{reason}.*measure a new one"
    with pytest.raises(ValueError, match=message):
        read_table(path, TWO_NODES, "gloo")


def test_binary_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_bytes(b"\xff\xfe\x00table")
    with pytest.raises(ValueError, match=r"table='.*broken.csv' is not an all-reduce table"):
        read_table(path, TWO_NODES, "gloo")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"table='.*nowhere.csv' cannot be read: No such file"):
        read_table(tmp_path / "nowhere.csv", TWO_NODES, "gloo")
    with pytest.raises(ValueError, match=r"table='.*' cannot be read: Is a directory"):
        read_table(tmp_path, TWO_NODES, "gloo")


@pytest.mark.parametrize(
    ("topology", "backend", "named"),
    [
        (Topology.build([0, 0, 1, 1], 4), "gloo", "topology_key 'nodes2x2_groups2x2'.*'nodes2x2_groups1x4'"),
        (UNEQUAL, "gloo", r"topology_key 'nodes2x2_groups2x2'.*'nodes1x3\+1x1_groups1x3\+1x1'"),
        (TWO_NODES, "nccl", "backend 'gloo'.*'nccl'"),
    ],
)
def test_table_of_another_cluster_is_refused(tmp_path: Path, topology: Topology, backend: str, named: str) -> None:
    write_table(crossing_table(), tmp_path / "table.csv")
    with pytest.raises(ValueError, match=rf"table='.*table.csv' was measured for {named}.*leave table out"):
        read_table(tmp_path / "table.csv", topology, backend)


def test_cache_has_a_file_for_each_topology_and_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = cached_table_path(TWO_NODES, "gloo")
    assert path == tmp_path / "cache" / "lightning_fourmin" / "gloo_nodes2x2_groups2x2.csv"
    others = {cached_table_path(UNEQUAL, "gloo"), cached_table_path(TWO_NODES, "nccl")}
    assert len({path, *others}) == 3
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cached_table_path(TWO_NODES, "gloo") == tmp_path / "home" / ".cache" / "lightning_fourmin" / path.name
