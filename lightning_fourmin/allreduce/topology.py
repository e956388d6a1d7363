"""Who is where: the node of every rank, and the groups and leaders that the all-reduce works in."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, zip_longest

from lightning_fourmin.text import plural


@dataclass(frozen=True)
class Topology:
    """Ranks on nodes, cut into groups; the first rank of a group is its leader.

    Example, 2 nodes of 3 ranks: groups (0 1 2) (3 4 5), leaders 0 and 3, columns (0 3) (1 4) (2 5).
    """

    node_of: tuple[int, ...]
    """Node rank of each rank."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group, in the order of their places."""

    @classmethod
    def build(cls, node_of: Sequence[int], group_size: int | None = None) -> "Topology":
        """Groups are the nodes, or with `group_size` consecutive ranks node by node (the last may be smaller)."""
        if not node_of:
            raise ValueError("a topology needs at least one rank")
        if group_size is not None and group_size < 1:
            raise ValueError(
                f"group_size must be at least 1, got {group_size}: leave it out to use the ranks of a node"
            )
        # Node by node, because a launcher may number ranks across nodes (0 2 on one, 1 3 on the other).
        line = sorted(range(len(node_of)), key=node_of.__getitem__)
        if group_size is None:
            groups = [tuple(ranks) for _, ranks in groupby(line, key=node_of.__getitem__)]
        else:
            groups = [tuple(line[i : i + group_size]) for i in range(0, len(line), group_size)]
        return cls(tuple(node_of), tuple(groups))

    @classmethod
    def from_key(cls, key: str) -> "Topology":
        """The topology that has this `key`, with ranks numbered node by node; ValueError if the text is not a key."""
        found = re.fullmatch(r"nodes([\dx+]+)_groups([\dx+]+)", key)
        if found is None:
            raise ValueError(f"{key!r} is not the key of a topology, such as nodes2x4_groups2x4")
        nodes, groups = (_sizes(counts) for counts in found.groups())
        node_of = tuple(node for node, size in enumerate(nodes) for _ in range(size))
        ends = list(accumulate(groups))
        if not ends or ends[-1] != len(node_of):
            raise ValueError(f"{key!r} has groups of {sum(groups)} ranks on nodes of {len(node_of)}")
        return cls(node_of, tuple(tuple(range(end - size, end)) for end, size in zip(ends, groups, strict=True)))

    def with_groups_of(self, group_size: int) -> "Topology":
        """The same ranks on the same nodes in other groups."""
        return Topology.build(self.node_of, group_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.node_of)

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(set(self.node_of))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each group."""
        return tuple(group[0] for group in self.groups)

    @cached_property
    def largest_group(self) -> int:
        """Ranks of the largest group."""
        return max(len(group) for group in self.groups)

    @cached_property
    def groups_span_nodes(self) -> bool:
        """Whether a group has ranks on several nodes."""
        return any(len({self.node_of[rank] for rank in group}) > 1 for group in self.groups)

    @property
    def equal_groups(self) -> bool:
        """Whether all groups have as many ranks."""
        return len({len(group) for group in self.groups}) == 1

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The ranks with the same place in their groups; the first column is the leaders."""
        return tuple(tuple(rank for rank in column if rank is not None) for column in zip_longest(*self.groups))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group that a rank is in."""
        return next(group for group in self.groups if rank in group)

    def column_of(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same place in their groups as `rank`."""
        return self.columns[self.group_of(rank).index(rank)]

    @cached_property
    def key(self) -> str:
        """Short name of the layout: ranks a node and ranks a group, for example `nodes2x2_groups2x2`."""
        nodes = [self.node_of.count(node) for node in sorted(set(self.node_of))]
        return f"nodes{_counts(nodes)}_groups{_counts([len(group) for group in self.groups])}"

    def __str__(self) -> str:
        sizes = "/".join(map(str, sorted({len(group) for group in self.groups})))
        groups = f"1 group of {sizes}" if len(self.groups) == 1 else f"{len(self.groups)} x groups of {sizes}"
        return f"{plural(self.world_size, 'rank')} on {plural(self.num_nodes, 'node')}, {groups}"


def _counts(sizes: list[int]) -> str:
    """Sizes in order, each run of equal ones as `{count}x{size}`, so that a thousand nodes still make a short name."""
    return "+".join(f"{len(list(run))}x{size}" for size, run in groupby(sizes))


def _sizes(counts: str) -> list[int]:
    """The inverse of `_counts`."""
    runs = [run.partition("x") for run in counts.split("+")]
    return [int(size) for count, _, size in runs for _ in range(int(count))]
