"""Norms are right to FP32's rounding for every size, layout and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_fourmin.optim.lars import NORM_BLOCK, cpu_norm, is_dense, norms


def exact(tensor: Tensor) -> float:
    return float(tensor.double().pow(2).sum().sqrt())


@settings(max_examples=50)
@given(
    size=st.sampled_from([0, 1, 7, NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK, 5 * NORM_BLOCK + 77]),
    offset=st.integers(0, 3),
    step=st.integers(1, 2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_norm_of_any_stretch(size: int, offset: int, step: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(offset + size * step, generator=torch.Generator().manual_seed(size)).to(dtype)[offset::step]
    assert tensor.numel() == size
    norm = cpu_norm(tensor)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(norm) == pytest.approx(exact(tensor), rel=1e-12 if dtype == torch.float64 else 5e-7)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_norm_of_images_in_either_layout(memory_format: torch.memory_format) -> None:
    tensor = torch.randn(8, 40, 7, 9).contiguous(memory_format=memory_format)[2:]
    assert is_dense(tensor)
    assert float(cpu_norm(tensor)) == pytest.approx(exact(tensor), rel=5e-7)


def test_large_norm_does_not_drift() -> None:
    tensor = torch.rand(8_000_000, generator=torch.Generator().manual_seed(0))
    assert abs(float(torch.linalg.vector_norm(tensor)) / exact(tensor) - 1) > 1e-5, (
        "torch's norm needs no blocks any more"
    )
    assert float(cpu_norm(tensor)) == pytest.approx(exact(tensor), rel=5e-7)


def test_norm_of_fp16_beyond_its_range() -> None:
    tensor = torch.full((300,), 6e4, dtype=torch.float16)
    assert norms([tensor, tensor[:0]]).tolist() == pytest.approx([exact(tensor), 0.0], rel=1e-6)
