"""The nets: sizes that the paper's plans depend on, images that they take, and that torch can compile them."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fourmin.models import build_model

SMALL = ["alexnet_bn_small", "resnet_small"]


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("name", "num_classes", "num_tensors", "num_parameters"),
    [
        ("alexnet_bn", 1000, 26, 62_381_096),
        ("resnet50", 1000, 161, 25_557_032),
        ("resnet18", 1000, 62, 11_689_512),
        ("alexnet_bn_small", 10, 26, 1_040_778),
        ("resnet_small", 10, 65, 272_474),
    ],
)
def test_sizes(name: str, num_classes: int, num_tensors: int, num_parameters: int) -> None:
    with torch.device("meta"):
        model = build_model(name, num_classes)
    assert len(names(model)) == num_tensors
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_alexnet_without_bn5() -> None:
    with torch.device("meta"):
        with_bn5, without = build_model("alexnet_bn", 1000), build_model("alexnet_bn", 1000, bn5=False)
    # The first 20 tensors end with bn5: the paper's production cut is between it and fc6.
    assert names(with_bn5)[18:21] == ["bn5.weight", "bn5.bias", "fc6.weight"]
    assert set(names(with_bn5)) - set(names(without)) == {"bn5.weight", "bn5.bias"}
    layers = [name for name, _ in without.named_children()]
    assert layers[layers.index("pool5") + 1] == "flatten"


def test_alexnet_order_of_layers() -> None:
    with torch.device("meta"):
        layers = [name for name, _ in build_model("alexnet_bn", 1000).named_children()]
    text = "conv1 relu1 pool1 bn1 conv2 relu2 pool2 bn2 conv3 relu3 bn3 conv4 relu4 bn4 conv5 relu5 pool5 bn5 flatten "
    assert layers == (text + "fc6 relu6 drop6 fc7 relu7 drop7 fc8").split()


def test_resnet50_strides_in_the_3x3() -> None:
    with torch.device("meta"):
        model = build_model("resnet50", 1000)
    strided = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert sorted(conv.kernel_size[0] for conv in strided) == [1, 1, 1, 3, 3, 3, 7]
    assert all(conv.in_channels < conv.out_channels for conv in strided if conv.kernel_size == (1, 1))


@pytest.mark.parametrize("name", ["resnet50", "resnet18", "resnet_small"])
def test_residual_branches_begin_at_zero(name: str) -> None:
    model = build_model(name, 10)
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    zero = [n for n, norm in norms if not norm.weight.any()]
    assert len(zero) == {"resnet50": 16, "resnet18": 8, "resnet_small": 9}[name]
    assert all(n.endswith(".branch.7" if name == "resnet50" else ".branch.4") for n in zero)
    assert all(norm.weight.eq(1).all() for n, norm in norms if n not in zero)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("image_size", [8, 28, 32, 64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_small_nets_take_small_images(name: str, image_size: int, memory_format: torch.memory_format) -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {"image_size": image_size} if name == "alexnet_bn_small" else {}
    model = build_model(name, 7, **options).to(memory_format=memory_format)
    images = torch.randn(2, 3, image_size, image_size)
    scores = model(images.to(memory_format=memory_format))
    assert scores.shape == (2, 7)
    scores.pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("name", "image_size"), [("alexnet_bn", 227), ("resnet50", 224), ("resnet18", 224)])
def test_big_nets_take_their_images(name: str, image_size: int) -> None:
    with torch.device("meta"):
        assert build_model(name, 1000)(torch.empty(2, 3, image_size, image_size)).shape == (2, 1000)


@pytest.mark.parametrize("name", SMALL)
def test_torch_compiles_the_whole_net(name: str) -> None:
    torch.manual_seed(1)
    model = build_model(name, 10).eval()
    images = torch.randn(2, 3, 32, 32)
    # The graph is taken as a whole (fullgraph); what a compiler makes of it is not our matter.
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alexnet", 10), "model='alexnet' is not known: did you mean 'alexnet_bn'? The others are 'alexnet_bn_small'"),
        (("vit", 10), "model='vit' is not known: choose one of 'alexnet_bn', 'alexnet_bn_small', 'resnet18'"),
        (("resnet18", 0), "num_classes=0 must be at least 1"),
    ],
)
def test_names_that_do_not_exist(arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        build_model(*arguments)
    assert str(caught.value).startswith(message)


def test_images_of_another_size_are_refused() -> None:
    model = build_model("alexnet_bn_small", 10, image_size=8)
    with pytest.raises(ValueError, match="images of 32 x 32 pixels in an AlexNet made for 8 x 8: give the model and"):
        model(torch.empty(1, 3, 32, 32))
    with pytest.raises(ValueError, match="image_size=66 leaves nothing after pool5"):
        build_model("alexnet_bn", 10, image_size=66)
