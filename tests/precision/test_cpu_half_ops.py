"""Products in FP32, rounded once: against a reference that rounds by hand, forward and backward."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fourmin.precision.cpu_half_ops import CpuHalfOps, needs_cpu_half_ops

Product = Callable[..., Tensor]

PRODUCTS: dict[str, tuple[Product, list[tuple[int, ...]]]] = {
    "conv1d": (F.conv1d, [(2, 4, 9), (6, 4, 3), (6,)]),
    "conv2d": (F.conv2d, [(2, 4, 9, 9), (6, 4, 3, 3), (6,)]),
    "conv3d": (F.conv3d, [(1, 2, 5, 5, 5), (3, 2, 3, 3, 3), (3,)]),
    "conv2d without bias": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(2, 4, 9, 9), (6, 4, 3, 3)]),
    "grouped": (lambda x, w, b: F.conv2d(x, w, b, groups=2), [(2, 4, 9, 9), (6, 2, 3, 3), (6,)]),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, groups=4), [(2, 4, 9, 9), (4, 1, 3, 3), (4,)]),
    "transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), [(2, 4, 5, 5), (4, 6, 3, 3), (6,)]),
    "linear": (F.linear, [(5, 7), (3, 7), (3,)]),
    "linear without bias": (F.linear, [(5, 7), (3, 7)]),
    "linear on a sequence": (F.linear, [(2, 5, 7), (3, 7), (3,)]),
    "matrix": (torch.matmul, [(5, 7), (7, 3)]),
    "batched matrix": (torch.matmul, [(2, 5, 7), (2, 7, 3)]),
    "matrices of a stack": (torch.matmul, [(4, 2, 5, 7), (4, 2, 7, 3)]),
    "matrix-vector": (torch.matmul, [(5, 7), (7,)]),
    "dot": (torch.matmul, [(7,), (7,)]),
    "baddbmm": (torch.baddbmm, [(2, 5, 3), (2, 5, 7), (2, 7, 3)]),
    "addmv": (torch.addmv, [(5,), (5, 7), (7,)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(2, 5, 7), (2, 3, 7)]),
    "attention": (F.scaled_dot_product_attention, [(2, 2, 6, 8)] * 3),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)],
    ),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def draw(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@DTYPES
@pytest.mark.parametrize("name", PRODUCTS)
def test_equal_to_rounding_by_hand(name: str, dtype: torch.dtype) -> None:
    product, shapes = PRODUCTS[name]
    inputs = draw(shapes, dtype)
    with CpuHalfOps():
        output = product(*inputs)
        seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        gradients = torch.autograd.grad(output, inputs, seed)

    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = product(*exact)
    # Attention's backward reads its own rounded output; the reference has to see it rounded too.
    if "attention" in name:
        expected_gradients: tuple[Tensor, ...] = attention_backward(exact, expected, seed.float(), dtype, name)
    else:
        expected_gradients = torch.autograd.grad(expected, exact, seed.float())
    assert output.dtype is dtype
    assert torch.equal(output, expected.to(dtype))
    for gradient, by_hand in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype is dtype
        assert torch.equal(gradient, by_hand.to(dtype))


def attention_backward(
    qkv: list[Tensor], output: Tensor, seed: Tensor, dtype: torch.dtype, name: str
) -> tuple[Tensor, ...]:
    causal = name.startswith("causal")
    _, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, causal)
    rounded = output.detach().to(dtype).float()
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return tuple(backward(seed, *(x.detach() for x in qkv), rounded, log_sums.detach(), 0.0, causal))


@pytest.mark.parametrize("name", PRODUCTS)
def test_same_in_inference_mode(name: str) -> None:
    product, shapes = PRODUCTS[name]
    inputs = draw(shapes, torch.float16)
    expected = product(*(x.detach().float() for x in inputs)).half()
    with torch.inference_mode(), CpuHalfOps():
        assert torch.equal(product(*inputs), expected)


def pooled(x: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima, their places, and the gradient that reaches `x`."""
    x = x.detach().requires_grad_()
    maxima, places = F.max_pool2d(x, return_indices=True, **options)
    weights = torch.arange(maxima.numel()).reshape(maxima.shape) % 7
    (gradient,) = torch.autograd.grad(maxima, x, weights.to(x.dtype))
    return maxima.detach(), places, gradient


@DTYPES
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 1, "dilation": 2},
        {"kernel_size": (3, 2), "stride": 2, "ceil_mode": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["plain", "channels last", "one image"])
def test_max_pooling_is_that_of_torch(dtype: torch.dtype, options: dict[str, Any], form: str) -> None:
    (x,) = draw([(2, 5, 9, 8)], dtype)
    # Few different values: the place of a maximum is then one of several.
    x = (2 * x.detach()).round() / 2
    x[0, 1, :4, :4] = -torch.inf
    if form == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif form == "one image":
        x = x[0]
    expected = pooled(x, **options)
    with CpuHalfOps():
        found = pooled(x, **options)
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_max_pooling_hands_on_what_is_not_a_number() -> None:
    x = torch.zeros(1, 3, 6, 6, dtype=torch.float16)
    x[0, 1, 2, 3] = torch.nan
    expected = F.max_pool2d(x, 3, 2)
    with CpuHalfOps():
        assert torch.equal(F.max_pool2d(x, 3, 2).isnan(), expected.isnan())
    assert expected.isnan().any()


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1),
    "lstm": (lambda: nn.LSTM(8, 5, batch_first=True), 1),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_close_to_fp32(name: str, training: bool) -> None:
    """Layers of several products, with their own kernels for evaluation: equal up to FP16's rounding."""
    torch.manual_seed(1)
    make, num_inputs = LAYERS[name]
    layer = make().train(training)
    x = torch.randn(2, 5, 8).half()
    with torch.set_grad_enabled(training):
        expected = layer.half().float()(*[x.float()] * num_inputs)
        with CpuHalfOps():
            found = layer.half()(*[x] * num_inputs)
    for f, e in zip(tensors(found), tensors(expected), strict=True):
        assert f.dtype is torch.float16
        torch.testing.assert_close(f.float(), e, rtol=5e-3, atol=5e-3)


def tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif nested is not None:
        for item in nested:
            yield from tensors(item)


def test_other_dtypes_pass_through() -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    with CpuHalfOps():
        assert torch.equal(a @ b, torch.mm(a, b))
        assert (a.double() @ b.double()).dtype is torch.float64
        assert torch.equal(torch.arange(6).view(2, 3) @ torch.arange(3), torch.tensor([5, 14]))


def test_products_of_all_sizes_in_a_row() -> None:
    """Buffers grow, serve smaller products, and those outside of inference mode after those in it."""
    kernels = CpuHalfOps()
    generator = torch.Generator().manual_seed(1)
    for size, inference in ((3, True), (9, False), (5, True), (40, False), (1, False), (0, False), (40, True)):
        a, b = (torch.randn(size, size, generator=generator).half() for _ in range(2))
        expanded = b[:1].expand(size, size) if size else b
        with torch.inference_mode(inference), kernels:
            products = [a @ b, a.T @ b, a @ b[:, ::2], a @ expanded]
        exact = [a.float() @ b.float(), a.T.float() @ b.float(), a.float() @ b[:, ::2].float()]
        for found, expected in zip(products, [*exact, a.float() @ expanded.float()], strict=True):
            assert torch.equal(found, expected.half())


def test_sums_are_fp32() -> None:
    """4096 ones and a half: FP16 stops counting ones at 2048."""
    ones = torch.ones(1, 4097, dtype=torch.float16)
    with CpuHalfOps():
        assert (ones @ ones.T).item() == 4096.0
        assert (ones @ (ones.T / 2)).item() == 2048.0


def test_compiled_code_runs_and_is_right() -> None:
    inputs = draw([(5, 7), (7, 3)], torch.float16)
    compiled = torch.compile(lambda a, b: torch.relu(a @ b) @ b.T, backend="aot_eager")
    with CpuHalfOps():
        expected = torch.relu(inputs[0] @ inputs[1]) @ inputs[1].T
        found = compiled(*inputs)
        gradients = torch.autograd.grad(found.sum(), inputs)
        expected_gradients = torch.autograd.grad(expected.sum(), inputs)
    assert torch.equal(found, expected)
    assert all(torch.equal(f, e) for f, e in zip(gradients, expected_gradients, strict=True))


def test_chosen_where_kernels_of_torch_are_slow_or_may_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for capabilities, expected in (
        ({"avx2": True, "avx512_bf16": False}, (True, True)),
        ({"avx512_bf16": True, "amx_tile": False}, (True, False)),
        ({"avx512_bf16": True, "avx512_fp16": True, "amx_tile": True}, (True, True)),
        ({"neon": True, "fp16_arith": True, "bf16": True}, (True, False)),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert tuple(needs_cpu_half_ops(cpu, d) for d in (torch.float16, torch.bfloat16)) == expected
    assert not needs_cpu_half_ops(torch.device("cuda"), torch.float16)
