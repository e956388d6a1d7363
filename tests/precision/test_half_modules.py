"""Modules that bring their parameters in 16 bit: they get FP32 masters, and their norm layers stay in FP32."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fourmin import FourMinPrecision
from tests.support.half_training import Net, fit, images, seeded, state, trainer


def test_half_parameters_get_fp32_masters() -> None:
    net = seeded()
    net.head.half()
    net.conv.weight.requires_grad_(False)
    net.conv.bfloat16()
    fit(net, FourMinPrecision())
    assert net.head.weight.dtype is torch.float32
    assert net.conv.weight.dtype is torch.bfloat16


def test_half_parameters_are_resumed_with_their_fp32_masters(tmp_path: Path) -> None:
    nets = [seeded(), seeded()]
    for net in nets:
        net.head.half()
    fit(nets[0], FourMinPrecision()).save_checkpoint(tmp_path / "some.ckpt")
    assert not torch.equal(nets[0].head.weight, nets[0].head.weight.half().float())
    trainer(FourMinPrecision()).fit(nets[1], images(4), ckpt_path=tmp_path / "some.ckpt")
    assert torch.equal(state(nets[1]), state(nets[0]))


class Normed(Net):
    """Batch norm, whose statistics are buffers, and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(5)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(super().forward(images))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def born_in(dtype: torch.dtype, frozen: bool) -> Normed:
    net: Normed = seeded(Normed)
    for norm in (net.norm, net.last):
        norm.requires_grad_(not frozen)
    return net.to(dtype)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_norm_layers_born_in_16_bit(tmp_path: Path, compute: str, dtype: torch.dtype, frozen: bool) -> None:
    net, resumed = born_in(dtype, frozen), born_in(dtype, frozen)
    same_in_fp32 = copy.deepcopy(net).float()
    runs = [trainer(FourMinPrecision(compute)) for _ in range(2)]
    for run, trained in zip(runs, (net, same_in_fp32), strict=True):
        run.fit(trained, images(4), images(1))
    assert torch.equal(state(net), state(same_in_fp32))
    assert {t.dtype for t in net.state_dict().values()} == {torch.float32, torch.int64}
    assert runs[0].validate(net, images(2), verbose=False) == runs[1].validate(same_in_fp32, images(2), verbose=False)
    # More exact than what it was born in can hold, and so it is resumed.
    assert not torch.equal(net.norm.running_mean, net.norm.running_mean.to(dtype).float())
    runs[0].save_checkpoint(tmp_path / "some.ckpt")
    trainer(FourMinPrecision(compute)).fit(resumed, images(4), images(1), ckpt_path=tmp_path / "some.ckpt")
    assert torch.equal(state(resumed), state(net))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_layers_born_in_16_bit_are_evaluated(dtype: torch.dtype) -> None:
    net = born_in(dtype, frozen=False)
    same_in_fp32 = copy.deepcopy(net).float()
    found, expected = (
        trainer(FourMinPrecision()).validate(evaluated, images(2), verbose=False) for evaluated in (net, same_in_fp32)
    )
    assert found == expected
