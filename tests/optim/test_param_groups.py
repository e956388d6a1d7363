"""Which parameters are decayed and adapted: weights yes, biases and norm parameters no."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_fourmin as fm


class ScaleNorm(nn.Module):
    """A user's norm layer that derives from none of torch's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.norm(dim=-1, keepdim=True)


class MyBatchNorm(nn.BatchNorm2d):
    """A user's norm layer that derives from torch's."""


def split(groups: list[dict[str, Any]]) -> tuple[set[str], set[str]]:
    """Names of the parameters with and without decay and trust ratio."""
    names: dict[str, set[str]] = {"weights": set(), "biases_and_norms": set()}
    for group in groups:
        names[group["name"]] = {name for name, _ in group["params"]}
    return names["weights"], names["biases_and_norms"]


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
        MyBatchNorm(4),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norm_layers_are_known_by_type(norm: nn.Module) -> None:
    weights, others = split(fm.param_groups(nn.Sequential(nn.Conv2d(3, 4, 3), norm), 1e-4))
    assert weights == {"0.weight"}
    assert others == {"0.bias", *(f"1.{name}" for name, _ in norm.named_parameters())}
    assert len(others) > 1


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(2, 3), {"bias"}),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), {"in_proj_bias", "bias_k", "bias_v", "out_proj.bias"}),
        (nn.LSTM(2, 3), {"bias_ih_l0", "bias_hh_l0"}),
        (nn.Embedding(3, 2), set()),
    ],
    ids=["linear", "attention", "lstm", "embedding"],
)
def test_biases_of_torch_layers(layer: nn.Module, expected: set[str]) -> None:
    weights, others = split(fm.param_groups(layer, 1e-4))
    assert others == expected
    assert weights == {name for name, _ in layer.named_parameters()} - expected


def test_bias_is_a_word_of_the_own_name_only() -> None:
    net = nn.ModuleDict({"bias": nn.Linear(2, 2, bias=False), "unbiased": nn.ParameterDict({"debias": torch.ones(2)})})
    assert split(fm.param_groups(net, 1e-4)) == ({"bias.weight", "unbiased.debias"}, set())


def test_what_the_groups_say() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    weights, others = fm.param_groups(net, 1e-4)
    assert weights == {"name": "weights", "params": [("0.weight", net[0].weight)], "weight_decay": 1e-4}
    assert others["weight_decay"] == 0.0
    assert others["trust_coefficient"] is None
    optimizer = fm.LARS([weights, others], lr=1.0)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight"],
        ["0.bias", "1.weight", "1.bias"],
    ]
    assert [group["trust_coefficient"] for group in optimizer.param_groups] == [0.001, None]


def test_own_norm_types_and_names_can_be_added() -> None:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), ScaleNorm(3))
    net.register_parameter("temperature", nn.Parameter(torch.ones(())))
    assert split(fm.param_groups(net, 1e-4)) == ({"0.weight", "1.weight", "temperature"}, set())
    assert split(fm.param_groups(net, 1e-4, norm_types=[ScaleNorm]))[1] == {"1.weight"}
    assert split(fm.param_groups(net, 1e-4, names=["temperature", "1.*"]))[1] == {"1.weight", "temperature"}


def test_frozen_parameters_are_kept_and_tied_ones_taken_once() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    assert split(fm.param_groups(nn.Sequential(first, second), 1e-4)) == ({"0.weight"}, {"0.bias", "1.bias"})


def test_the_groups_cover_every_parameter_once() -> None:
    net = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    found = [parameter for group in fm.param_groups(net, 1e-4) for _, parameter in group["params"]]
    assert {id(p) for p in found} == {id(p) for p in net.parameters()}
    assert len(found) == len(list(net.parameters()))


def test_groups_without_parameters_are_left_out() -> None:
    assert [group["name"] for group in fm.param_groups(nn.Linear(2, 2, bias=False), 1e-4)] == ["weights"]
    assert [group["name"] for group in fm.param_groups(nn.LayerNorm(2), 1e-4)] == ["biases_and_norms"]


def test_errors() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters to make groups of"):
        fm.param_groups(nn.ReLU(), 1e-4)
    with pytest.raises(ValueError, match=r"names has '\*.gama', which matches no parameter of Linear"):
        fm.param_groups(nn.Linear(2, 2), 1e-4, names=["*.gama"])
