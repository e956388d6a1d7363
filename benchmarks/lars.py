"""One optimizer step on ResNet-50's 161 tensors: LARS against torch's fused SGD and pytorch-optimizer's LARS.

Example: .venv/bin/python benchmarks/lars.py
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytorch_optimizer
import torch
from torch import Tensor, nn

from lightning_fourmin import LARS
from results import table, write
from stats import estimate, paired_ratio

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
MOST_OVER_FUSED_SGD = 1.8
LEAST_OVER_PYTORCH_OPTIMIZER = 2.5
OURS = "LARS"
FUSED_SGD = "torch SGD, fused"
OTHER_LARS = "pytorch-optimizer LARS"


def resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """Convolutions without bias, each with the scale and shift of its batch norm; the classifier with a bias."""

    def convolution(out: int, width: int, side: int) -> Iterator[tuple[int, ...]]:
        yield from ((out, width, side, side), (out,), (out,))

    yield from convolution(64, 3, 7)
    before = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            yield from convolution(width, before, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, before, 1)
            before = 4 * width
    yield from ((1000, 2048), (1000,))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(0.05 * torch.randn(shape, generator=generator)) for shape in resnet50_shapes()]
    for parameter in made:
        parameter.grad = 0.01 * torch.randn(parameter.shape, generator=generator)
    return made


def groups() -> list[dict[str, object]]:
    """Biases and batch norm without decay and trust ratio, as `param_groups` makes them."""
    made = parameters()
    vectors: list[Tensor] = [parameter for parameter in made if parameter.ndim == 1]
    weights: list[Tensor] = [parameter for parameter in made if parameter.ndim > 1]
    return [{"params": weights}, {"params": vectors, "weight_decay": 0.0, "trust_coefficient": None}]


def variants() -> dict[str, Callable[[], object]]:
    """Name -> step. Each has tensors of its own, so that none finds them in the cache from the one before."""
    return {
        FUSED_SGD: torch.optim.SGD(parameters(), fused=True, **OPTIONS).step,
        OURS: LARS(groups(), **OPTIONS).step,
        'LARS, form="torch"': LARS(groups(), form="torch", **OPTIONS).step,
        "LARS, Nesterov": LARS(groups(), nesterov=True, **OPTIONS).step,
        "LARS, a ratio for all 161": LARS(parameters(), **OPTIONS).step,
        "torch SGD, foreach": torch.optim.SGD(parameters(), foreach=True, **OPTIONS).step,
        OTHER_LARS: pytorch_optimizer.LARS(parameters(), **OPTIONS).step,
    }


def measure(num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step: each variant once a round, in changing order, because a step feels the one before it."""
    steps = list(variants().items())
    times_ms: dict[str, list[float]] = {name: [] for name, _ in steps}
    shuffling = random.Random(0)
    for round_number in range(num_rounds + 2):
        for name, step in shuffling.sample(steps, len(steps)):
            start = time.perf_counter()
            step()
            if round_number >= 2:
                times_ms[name].append(1000 * (time.perf_counter() - start))
    return times_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    arguments = parser.parse_args()
    times_ms = measure(arguments.rounds)
    slowdown = {name: paired_ratio(times, times_ms[FUSED_SGD]) for name, times in times_ms.items()}
    speedup = {name: paired_ratio(times_ms[OTHER_LARS], times) for name, times in times_ms.items()}
    rows = [
        [name, f"{estimate(times).median:.1f}", str(slowdown[name]), str(speedup[name])]
        for name, times in times_ms.items()
    ]
    cost, gain = slowdown[OURS], speedup[OURS]
    text = (
        f"Time of a step on ResNet-50's {len(list(resnet50_shapes()))} tensors in FP32, {torch.get_num_threads()} "
        f"threads; medians\nof {arguments.rounds} rounds, ratios of times in the same round with 95 % intervals.\n\n"
        f"LARS takes {cost} x the time of fused SGD ({_verdict(cost.low <= MOST_OVER_FUSED_SGD)} at most "
        f"{MOST_OVER_FUSED_SGD})\nand is {gain} x as fast as pytorch-optimizer's "
        f"({_verdict(gain.meets(LEAST_OVER_PYTORCH_OPTIMIZER))} at least {LEAST_OVER_PYTORCH_OPTIMIZER}).\n\n"
    )
    header = ["optimizer", "ms", "x the time of fused SGD", "x as fast as pytorch-optimizer"]
    data = {
        name: {"ms": times_ms[name], "over_fused_sgd": asdict(slowdown[name]), "speedup": asdict(speedup[name])}
        for name in times_ms
    }
    write("lars", f"python benchmarks/lars.py --rounds {arguments.rounds}", data, text + table(header, rows))


def _verdict(reached: bool) -> str:
    return "goal:" if reached else "MISSES the goal:"


if __name__ == "__main__":
    main()
