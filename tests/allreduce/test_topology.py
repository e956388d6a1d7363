"""Groups, leaders and columns that a topology makes of ranks on nodes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fourmin.allreduce.topology import Topology


def test_groups_are_the_nodes() -> None:
    topology = Topology.build([0, 0, 0, 1, 1, 1])
    assert topology.groups == ((0, 1, 2), (3, 4, 5))
    assert topology.leaders == (0, 3)
    assert topology.columns == ((0, 3), (1, 4), (2, 5))
    assert (topology.world_size, topology.num_nodes, topology.largest_group) == (6, 2, 3)
    assert topology.equal_groups


def test_unequal_nodes() -> None:
    topology = Topology.build([0, 1, 1, 1, 2, 2])
    assert topology.groups == ((0,), (1, 2, 3), (4, 5))
    assert topology.leaders == (0, 1, 4)
    assert topology.columns == ((0, 1, 4), (2, 5), (3,))
    assert topology.largest_group == 3
    assert not topology.equal_groups


def test_interleaved_nodes_stay_together() -> None:
    topology = Topology.build([0, 1, 0, 1])
    assert topology.groups == ((0, 2), (1, 3))
    assert topology.leaders == (0, 1)
    assert topology.columns == ((0, 1), (2, 3))
    assert topology.group_of(3) == (1, 3)
    assert topology.column_of(3) == (2, 3)


def test_groups_follow_node_ranks_and_not_first_sight() -> None:
    topology = Topology.build([7, 7, 3, 3])
    assert topology.groups == ((2, 3), (0, 1))
    assert topology.leaders == (2, 0)


@pytest.mark.parametrize(
    ("group_size", "groups"),
    [
        (1, ((0,), (2,), (1,), (3,))),
        (2, ((0, 2), (1, 3))),
        (3, ((0, 2, 1), (3,))),
        (4, ((0, 2, 1, 3),)),
        (9, ((0, 2, 1, 3),)),
    ],
)
def test_group_size_cuts_node_by_node(group_size: int, groups: tuple[tuple[int, ...], ...]) -> None:
    topology = Topology.build([0, 1, 0, 1], group_size)
    assert topology.groups == groups
    assert topology.equal_groups == (group_size != 3)


@pytest.mark.parametrize("group_size", [None, 1, 4])
def test_one_rank(group_size: int | None) -> None:
    topology = Topology.build([0], group_size)
    assert topology.groups == ((0,),) == topology.columns
    assert topology.leaders == (0,)
    assert str(topology) == "1 rank on 1 node, 1 group of 1"
    assert topology.key == "nodes1x1_groups1x1"


@pytest.mark.parametrize(
    ("node_of", "group_size", "key", "text"),
    [
        ([0, 0, 1, 1], None, "nodes2x2_groups2x2", "4 ranks on 2 nodes, 2 x groups of 2"),
        ([0, 0, 1, 1], 4, "nodes2x2_groups1x4", "4 ranks on 2 nodes, 1 group of 4"),
        ([0, 1, 1, 1, 2, 2], None, "nodes1x1+1x3+1x2_groups1x1+1x3+1x2", "6 ranks on 3 nodes, 3 x groups of 1/2/3"),
        ([0, 0, 0], 2, "nodes1x3_groups1x2+1x1", "3 ranks on 1 node, 2 x groups of 1/2"),
        ([n for n in range(1000) for _ in range(8)], 4, "nodes1000x8_groups2000x4", None),
    ],
)
def test_key_and_text(node_of: list[int], group_size: int | None, key: str, text: str | None) -> None:
    topology = Topology.build(node_of, group_size)
    assert topology.key == key
    if text is not None:
        assert str(topology) == text


def test_equal_layouts_are_equal_plans() -> None:
    assert Topology.build([0, 0, 1, 1]) == Topology.build((0, 0, 1, 1), 2)
    assert Topology.build([0, 0, 1, 1]) != Topology.build([0, 0, 1, 1], 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology.build([0]).groups = ()  # type: ignore[misc]


@pytest.mark.parametrize("group_size", [0, -2])
def test_group_size_must_be_positive(group_size: int) -> None:
    with pytest.raises(ValueError, match=rf"group_size must be at least 1, got {group_size}: leave it out"):
        Topology.build([0, 0], group_size)


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Topology.build([])


@given(
    node_of=st.lists(st.integers(0, 5), min_size=1, max_size=24),
    group_size=st.none() | st.integers(1, 26),
)
def test_groups_and_columns_partition_the_ranks(node_of: list[int], group_size: int | None) -> None:
    topology = Topology.build(node_of, group_size)
    everyone = list(range(len(node_of)))
    assert sorted(rank for group in topology.groups for rank in group) == everyone
    assert sorted(rank for column in topology.columns for rank in column) == everyone
    assert all(topology.groups), "no group is empty"
    assert topology.leaders == tuple(group[0] for group in topology.groups) == topology.columns[0]
    assert topology.largest_group == len(topology.columns)
    if group_size is None:
        assert all(len({node_of[rank] for rank in group}) == 1 for group in topology.groups)
        assert len(topology.groups) == topology.num_nodes
    else:
        assert all(len(group) == group_size for group in topology.groups[:-1])
        assert len(topology.groups[-1]) <= group_size
    # Ranks of a node follow each other on the line that the groups cut, in rising order.
    line = [(node_of[rank], rank) for group in topology.groups for rank in group]
    assert line == sorted(line)
    for rank in everyone:
        assert rank in topology.group_of(rank)
        assert rank in topology.column_of(rank)
