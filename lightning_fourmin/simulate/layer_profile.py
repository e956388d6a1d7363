"""Profile of a module: how long forward, backward and update take, and when backward has each gradient ready.

forward    |conv1 conv2 fc |
backward                   |fc |conv2 |conv1 |
ready                          ^      ^      ^      what tensor fusion and the simulator wait for

A profile is measured with `measure_profile`, or computed from FLOPs and bytes (`roofline.py`).
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fourmin.errors import PlanError
from lightning_fourmin.tune.step_trial import sum_of

NUM_WARMUP = 2
"""The first steps of a measurement, which do not count."""
ARGUMENT_ERRORS = (AttributeError, RuntimeError, TypeError, ValueError)
"""The errors that a module's constructor or forward raises if it gets arguments that it does not take."""

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter, with the name and the bytes that it has in the fusion plan."""

    name: str
    num_bytes: int
    ready_s: float
    """Seconds from the start of backward until the gradient is there."""


@dataclass(frozen=True)
class Profile:
    """The times of one step of one rank that does not communicate."""

    gradients: tuple[Gradient, ...]
    """The gradients in the order in which backward has them ready."""
    forward_s: float
    backward_s: float
    update_s: float
    """The time of the optimizer's step, and of whatever else lies between the last gradient and the next forward."""
    batch_size: int
    source: str
    """A text for people on where the times come from."""

    @property
    def compute_s(self) -> float:
        """The length of the step."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def samples_per_s(self) -> float:
        """The throughput of the rank: S of T = S * N * e."""
        return self.batch_size / self.compute_s

    def scaled(self, factor: float) -> "Profile":
        """The same step with every time multiplied by a factor."""
        return replace(
            self,
            gradients=tuple(replace(one, ready_s=factor * one.ready_s) for one in self.gradients),
            forward_s=factor * self.forward_s,
            backward_s=factor * self.backward_s,
            update_s=factor * self.update_s,
        )


@dataclass
class Marks:
    """Points in time of one step: in seconds, or as CUDA's events while the step is measured on a GPU."""

    start: Any
    """When forward begins."""
    backward: Any
    """When backward begins."""
    gradients: list[tuple[str, Any]]
    """When each gradient is ready, by the name of its parameter."""
    end: Any
    """When backward is over."""


def measure_profile(
    module: nn.Module,
    inputs: Tensor | Sequence[Any],
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    repetitions: int = 5,
    before_step: Callable[[], object] = lambda: None,
) -> Profile:
    """The profile of `module` on its own device: medians over several steps.

    A copy is trained, so `module` and the random state stay as they are. Without `loss` the sum of all outputs is
    differentiated; without `optimizer` the update takes no time. Where ranks share cores, a barrier as `before_step`
    makes them compete for the cores as they do in training.
    """
    replica = copy.deepcopy(module).train()
    parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    device = parameters[0].device.type if parameters else "cpu"
    copy_optimizer = None if optimizer is None or not parameters else optimizer(parameters)
    mark: Callable[[], Any] = time.perf_counter
    seconds: Callable[[Any, Any], float] = _host_seconds
    if device == "cuda":
        mark, seconds = _cuda_mark, _cuda_seconds
    steps, updates_s = [], []
    with torch.random.fork_rng():
        for _ in range(NUM_WARMUP + repetitions):
            before_step()
            marks = record(replica, inputs, loss, mark)
            if copy_optimizer is not None:
                copy_optimizer.step()
            updated = mark()
            replica.zero_grad()
            # Only now: asking for seconds lets the host wait for the device, which would lengthen the step.
            since_start = partial(seconds, marks.start)
            gradients = [(name, since_start(ready)) for name, ready in marks.gradients]
            steps.append(Marks(0.0, since_start(marks.backward), gradients, since_start(marks.end)))
            updates_s.append(seconds(marks.end, updated))
    update_s = statistics.median(updates_s[NUM_WARMUP:])
    source = f"measured on {device}, n={repetitions}"
    return profile_of(steps[NUM_WARMUP:], update_s, replica, batch_size_of(inputs), source)


def _host_seconds(start: float, end: float) -> float:
    """The seconds of a step's part on the CPU, where an operation is done when it returns."""
    return end - start


def _cuda_mark() -> torch.cuda.Event:
    """An event on the stream: the host, which runs ahead of the device, need not wait to mark a point in time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """The seconds between two events; the host waits until the device has passed both."""
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def record(module: nn.Module, inputs: Tensor | Sequence[Any], loss: Loss | None, mark: Callable[[], Any]) -> Marks:
    """Runs forward and backward once, and calls `mark` at the points in time that Marks names."""
    gradients: list[tuple[str, Any]] = []
    with ExitStack() as hooks:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: gradients.append((name, mark()))
                )
                hooks.enter_context(hook)
        start = mark()
        output = module(*([inputs] if isinstance(inputs, Tensor) else inputs))
        total = sum_of(output) if loss is None else loss(output)
        backward = mark()
        total.backward()
        return Marks(start, backward, gradients, mark())


def profile_of(steps: Sequence[Marks], update_s: float, module: nn.Module, batch_size: int, source: str) -> Profile:
    """The profile of several recorded steps, whose marks are in seconds: the medians of their times."""
    num_bytes = {name: p.numel() * p.element_size() for name, p in module.named_parameters() if p.requires_grad}
    missing = sorted(num_bytes.keys() - {name for name, _ in steps[0].gradients})
    if missing or not num_bytes:
        what = f"{missing[0]} (1 of {len(missing)}) gets no gradient" if missing else "it has no trainable parameters"
        raise PlanError(
            f"{type(module).__name__} cannot be profiled: {what}; freeze what is not trained, or return from "
            "forward every output that is"
        )
    ready: dict[str, list[float]] = {name: [] for name in num_bytes}
    for step in steps:
        for name, at in step.gradients:
            ready[name].append(at - step.backward)
    gradients = sorted(
        (Gradient(name, num_bytes[name], statistics.median(times)) for name, times in ready.items()),
        key=lambda gradient: gradient.ready_s,
    )
    return Profile(
        tuple(gradients),
        statistics.median(step.backward - step.start for step in steps),
        statistics.median(step.end - step.backward for step in steps),
        update_s,
        batch_size,
        source,
    )


def input_error(module: nn.Module, sample_shape: Sequence[int], error: Exception) -> PlanError:
    """An error for users whose module cannot be trained with an input; `error` is the one that the module raised."""
    return PlanError(
        f"{type(module).__name__} cannot be trained with an input of {list(sample_shape)} ({error}): check input_shape"
    )


def batch_size_of(inputs: Tensor | Sequence[Any]) -> int:
    """The number of samples in a batch: the length of its first tensor."""
    first = inputs if isinstance(inputs, Tensor) else next(value for value in inputs if isinstance(value, Tensor))
    return len(first)
