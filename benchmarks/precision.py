"""FourMinPrecision on a CPU: time of a training step, bytes a parameter, bytes on the wire.

Example: .venv/bin/python benchmarks/precision.py             # all: 5 minutes, half of them in Lightning's 16-true
         .venv/bin/python benchmarks/precision.py --only resnet18
"""

import argparse
import logging
import statistics
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fourmin as fm
from lightning_fourmin.allreduce.buckets import wire_bytes
from models import FullyConnectedHeavy, ResNet18, SmallAlexNetBN
from results import read, table, write
from stats import Estimate, paired_ratio
from step_rank import Classifier, StepTimes

NETS: dict[str, tuple[type[nn.Module], int, int]] = {
    "alexnet_bn": (SmallAlexNetBN, 64, 64),
    "resnet18": (ResNet18, 96, 16),
}
"""Name -> net, image side in pixels, batch."""
VARIANTS: dict[str, Any] = {
    "fp32": lambda: {},
    "fourmin_fp16": lambda: {"plugins": [fm.FourMinPrecision()]},
    "fourmin_bf16": lambda: {"plugins": [fm.FourMinPrecision("bf16")]},
    "lightning_16_true": lambda: {"precision": "16-true"},
}
SLOW = "lightning_16_true"
MOST_OVER_FP32 = 1.25
LEAST_OVER_LIGHTNING = 20.0
NUM_WARMUP = 2


def fit(net: nn.Module, side: int, batch_size: int, num_batches: int, *callbacks: L.Callback, **kwargs: Any) -> None:
    count = batch_size * num_batches
    data = TensorDataset(torch.randn(count, 3, side, side), torch.arange(count) % 10)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **kwargs,
    )
    trainer.fit(Classifier(net), DataLoader(data, batch_size))


def step_ms(net_name: str, variant: str, num_steps: int) -> float:
    """Median of the steps after the first ones; the slow variant is measured on its first step."""
    make, side, batch_size = NETS[net_name]
    L.seed_everything(1, verbose=False)
    times = StepTimes()
    warmup, num_steps = (0, 1) if variant == SLOW else (NUM_WARMUP, num_steps)
    fit(make(), side, batch_size, warmup + num_steps + 1, times, **VARIANTS[variant]())
    steps = [1e3 * (b - a) for a, b in zip(times.stamps, times.stamps[1:], strict=False)]
    return statistics.median(steps[warmup:])


def measure(net_name: str, rounds: int, slow_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Step of each variant in each round, in ms."""
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(rounds):
        order = [v for v in VARIANTS if v != SLOW or turn < slow_rounds]
        for variant in order if turn % 2 == 0 else reversed(order):
            times[variant].append(step_ms(net_name, variant, num_steps))
    return times


class Bytes(L.Callback):
    """Counts bytes of everything that exists once a parameter."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self._shapes = {tuple(sorted(p.shape)) for p in module.parameters()}
        self._copies: dict[int, int] = {}
        self._masters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._keep("parameters", list(module.parameters()))
        if isinstance(trainer.strategy, fm.FourMinStrategy):
            assert trainer.strategy.model is not None
            bytes_a_step = wire_bytes(trainer.strategy.model, trainer.strategy.wire_dtype)
            self.found["on the wire"] = bytes_a_step / self.num_parameters
        step = module.training_step

        def watched(*args: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._see, lambda tensor: tensor):
                return step(*args)

        module.training_step = watched  # type: ignore[method-assign]

    def _see(self, tensor: Tensor) -> Tensor:
        """A tensor that backward keeps: a copy of a weight if it has the shape of one and is not that one."""
        storage = tensor.untyped_storage()
        if tuple(sorted(tensor.shape)) in self._shapes and storage.data_ptr() not in self._masters:
            self._copies[storage.data_ptr()] = storage.nbytes()
        return tensor

    def on_train_batch_start(self, *_: Any) -> None:
        self._copies.clear()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self._keep("gradients", [p.grad for p in module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.found["copies"] = sum(self._copies.values()) / self.num_parameters
        state = [t for s in trainer.optimizers[0].state.values() for t in s.values() if isinstance(t, Tensor)]
        self._keep("momentum", state)

    def _keep(self, name: str, tensors: list[Tensor]) -> None:
        self.found[name] = sum(t.untyped_storage().nbytes() for t in tensors) / self.num_parameters


def measure_bytes() -> dict[str, dict[str, float]]:
    """Bytes a parameter of a net that is nearly all weights, for each way to train it."""
    ways = {
        "fp32": {},
        "bf16-mixed (AMP)": {"precision": "bf16-mixed"},
        "16-true of Lightning": {"precision": "16-true"},
        "fourmin, fp32": {"strategy": "fourmin"},
        "fourmin, 16-true": {"strategy": "fourmin", "precision": "16-true"},
    }
    found = {}
    for name, kwargs in ways.items():
        counter = Bytes()
        # Several steps: the first ones in FP16 may be skipped to find the loss scale.
        fit(FullyConnectedHeavy(), 32, 2, 8, counter, **kwargs)
        found[name] = counter.found
    return found


def judged(ratio: Estimate, meets: bool, goal: str) -> str:
    return f"{ratio} {'meets' if meets else 'MISSES'} {goal}"


def row(net_name: str, times: dict[str, list[float]]) -> list[str]:
    over_fp32 = paired_ratio(times["fourmin_fp16"], times["fp32"])
    slow = times[SLOW]
    over_lightning = paired_ratio(slow, times["fourmin_fp16"][: len(slow)])
    return [
        net_name,
        str(len(times["fp32"])),
        *(f"{statistics.median(times[variant]):.0f}" for variant in VARIANTS),
        judged(over_fp32, over_fp32.low <= MOST_OVER_FP32, f"<= {MOST_OVER_FP32:g}"),
        str(paired_ratio(times["fourmin_bf16"], times["fp32"])),
        judged(over_lightning, over_lightning.meets(LEAST_OVER_LIGHTNING), f">= {LEAST_OVER_LIGHTNING:g}"),
        str(paired_ratio(slow, times["fp32"][: len(slow)])),
    ]


def report(data: dict[str, Any]) -> str:
    steps = [row(name, data["steps"][name]) for name in NETS if name in data["steps"]]
    ratios = ("FP16 / FP32", "BF16 / FP32", "Lightning 16-true / FP16", "Lightning 16-true / FP32")
    header = ["net", "rounds", *(f"{v} ms" for v in VARIANTS), *ratios]
    columns = ["parameters", "copies", "gradients", "momentum", "on the wire"]
    memory = [[way, *(f"{b[c]:.2f}" if c in b else "-" for c in columns)] for way, b in data["bytes"].items()]
    return (
        "Training step on one device, SGD with momentum; median and 95 % interval of ratios inside a round.\n\n"
        f"{table(header, steps)}\n\n"
        "FP16 products are computed in FP32 here, so FP16 can hardly be faster than FP32: the last column is about\n"
        "the most that the one before it could be. What is between them are casts between layers.\n\n"
        "Bytes a parameter, from the tensors of a step of a net with 2.2 M parameters. Copies are what the backward\n"
        "pass keeps of weights besides the parameters. On the wire: the strategy's own count, gradients times the\n"
        "width of the wire's dtype; a test holds it against the tensors that the engine sends.\n\n"
        f"{table(['training', *columns], memory)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(NETS), default=list(NETS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slow-rounds", type=int, default=2, help="of Lightning's 16-true, up to 20 s a step")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data: dict[str, Any] = read("precision") or {"steps": {}}
    data["bytes"] = measure_bytes()
    for net_name in arguments.only:
        data["steps"][net_name] = measure(net_name, arguments.rounds, arguments.slow_rounds, arguments.steps)
    command = f"python benchmarks/precision.py --rounds {arguments.rounds} --slow-rounds {arguments.slow_rounds}"
    write("precision", command, data, report(data))


if __name__ == "__main__":
    main()
