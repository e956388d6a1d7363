"""Where the division by the world size happens: the factors always multiply to 1 / world."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fourmin.allreduce.predivide import Scales, scales
from lightning_fourmin.allreduce.topology import Topology

LAYOUTS = {
    "one": Topology.build([0]),
    "equal": Topology.build([0, 0, 0, 1, 1, 1]),
    "unequal": Topology.build([0, 0, 0, 1, 2, 2]),
    "not dividing": Topology.build([0, 0, 0, 1, 1], 3),
}
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def product(factors: Scales) -> float:
    return factors.before * factors.reduce * factors.scatter * factors.after


def mean_in_phases(values: list[float], topology: Topology, factors: Scales) -> float:
    """What the phases make of one value a rank: a sum inside each group, then one between the groups."""
    inside = [factors.reduce * sum(factors.before * values[rank] for rank in group) for group in topology.groups]
    return factors.after * factors.scatter * sum(inside)


@pytest.mark.parametrize("topology", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *SIXTEEN_BIT])
@pytest.mark.parametrize("predivide", [None, 1, 2.5, 64])
@pytest.mark.parametrize("local_sums", [True, False])
def test_phases_make_the_mean(
    topology: Topology, dtype: torch.dtype, predivide: float | None, local_sums: bool
) -> None:
    factors = scales(topology, dtype, predivide, local_sums)
    values = [float(2**rank) for rank in range(topology.world_size)]
    assert mean_in_phases(values, topology, factors) == pytest.approx(sum(values) / len(values), rel=1e-12)
    assert product(factors) == pytest.approx(1 / topology.world_size, rel=1e-12)


@given(
    node_of=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    group_size=st.none() | st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, *SIXTEEN_BIT]),
    predivide=st.none() | st.floats(0.01, 1e4),
    local_sums=st.booleans(),
)
def test_factors_multiply_to_one_over_world(
    node_of: list[int], group_size: int | None, dtype: torch.dtype, predivide: float | None, local_sums: bool
) -> None:
    factors = scales(Topology.build(node_of, group_size), dtype, predivide, local_sums)
    assert product(factors) == pytest.approx(1 / len(node_of), rel=1e-12)


@pytest.mark.parametrize("topology", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("local_sums", [True, False])
def test_fp32_divides_by_the_world_first_as_ddp_does(topology: Topology, local_sums: bool) -> None:
    assert scales(topology, torch.float32, None, local_sums) == Scales(1 / topology.world_size, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BIT])
def test_explicit_predivide_wins(dtype: torch.dtype) -> None:
    assert scales(LAYOUTS["unequal"], dtype, 4.0, True) == Scales(0.25, 1.0, 1.0, 4.0 / 6)


@pytest.mark.parametrize("topology", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_own_16_bit_sums_stay_in_the_range_of_the_gradients(topology: Topology, dtype: torch.dtype) -> None:
    factors = scales(topology, dtype, None, True)
    largest = float(torch.finfo(dtype).max)
    group_sums = [factors.reduce * len(group) * factors.before * largest for group in topology.groups]
    assert max(group_sums) <= largest
    assert factors.scatter * sum(group_sums) <= largest
    # The largest gradient goes out as it came in: nothing is lost to underflow before the first sum.
    assert factors.before == 1.0


@pytest.mark.parametrize(("world", "factor"), [(1, 1), (2, 2), (4, 2), (8, 4), (12, 4), (256, 16), (1024, 32)])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_backend_16_bit_sums_get_a_power_of_two_near_the_root(world: int, factor: int, dtype: torch.dtype) -> None:
    factors = scales(Topology.build([0] * world), dtype, None, False)
    assert factors == Scales(1 / factor, 1.0, 1.0, factor / world)
