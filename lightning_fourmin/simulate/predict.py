"""The work behind `fourmin plan`: checks the options, times the layers, and simulates what the options describe."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fourmin.allreduce.plan import HYBRID, WIRE_DTYPES
from lightning_fourmin.errors import PlanError
from lightning_fourmin.models import build_model
from lightning_fourmin.simulate.cluster import Cluster, Reference
from lightning_fourmin.simulate.layer_profile import ARGUMENT_ERRORS, Profile, input_error, measure_profile
from lightning_fourmin.simulate.result import SimulationResult
from lightning_fourmin.simulate.roofline import peak_profile
from lightning_fourmin.simulate.scenario import Scenario
from lightning_fourmin.simulate.stragglers import Stragglers

MEASURED, SCALED = "measured", "scaled"
"""The values of `layer_times`: layers are measured on this machine, or their times computed from FLOPs and bytes."""


@dataclass
class PlanOptions:
    """The options of `fourmin plan`; conf/plan.yaml explains each. A value that makes no sense is a PlanError.

    Those from `model` to `num_classes` describe the net, which the command line builds.
    """

    model: str = "resnet50"
    model_options: dict[str, Any] | None = None
    """model.model_options on the command line."""
    module: str | None = None
    module_options: dict[str, Any] | None = None
    input_shape: list[int] | None = None
    num_classes: int = 1000
    cluster: dict[str, Any] = field(default_factory=dict)
    """The content of a file of conf/cluster."""
    batch_size: int = 64
    num_ranks: int = 1024
    most_ranks: int = 4096
    layer_times: str = SCALED
    samples_per_s: float | None = None
    table: str | None = None
    algorithm: str = HYBRID
    group_size: int | None = None
    fusion_mb: float | None = None
    switch_mb: float | None = None
    wire_dtype: str = "fp16"
    stragglers: Stragglers = field(default_factory=lambda: Stragglers(slowdown=2.0))
    epochs: int = 90
    num_samples: int = 1281167
    out: str | None = "plan"

    @property
    def is_run(self) -> bool:
        """Whether the net is run on this machine. If it is not, the shapes of its tensors are enough."""
        return self.layer_times == MEASURED

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_ranks", "most_ranks", "num_classes", "epochs", "num_samples"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("samples_per_s", "switch_mb"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise PlanError(f"{name}={value:g} must be above 0")
        if self.fusion_mb is not None and self.fusion_mb < 0:
            raise PlanError(f"fusion_mb={self.fusion_mb:g} must be 0 (every gradient alone) or more")
        if self.wire_dtype not in WIRE_DTYPES:
            raise PlanError(f"wire_dtype={self.wire_dtype} is not known: choose one of {', '.join(WIRE_DTYPES)}")
        if self.switch_mb is not None and self.algorithm != HYBRID:
            raise PlanError(
                f"switch_mb={self.switch_mb:g} is the switch of algorithm=hybrid, but algorithm={self.algorithm}: "
                "drop one"
            )
        if self.layer_times not in (SCALED, MEASURED):
            raise PlanError(f"layer_times={self.layer_times} is not known: choose scaled or measured")


def predict(options: PlanOptions, module: nn.Module, inputs: Tensor) -> SimulationResult:
    """What `fourmin plan` answers for a net and a batch of inputs for it.

    Both may be on the meta device, without values, unless the layers are to be measured. PlanError says which option
    makes no sense.
    """
    cluster, table = Cluster.from_config(options.cluster), None
    if options.table is not None:
        cluster, table = cluster.measured(Path(options.table))
    profile, fp32_profile = _layer_times(options, cluster, module, inputs)
    group_size = options.group_size
    if group_size is None and table is not None and (table.group_size or 0) <= options.num_ranks:
        group_size = table.group_size
    scenario = Scenario(
        [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad],
        profile,
        cluster,
        options.num_ranks,
        options.fusion_mb,
        options.algorithm,
        group_size,
        options.switch_mb,
        wire_dtype=WIRE_DTYPES[options.wire_dtype],
        stragglers=options.stragglers,
        measured=table,
    )
    return SimulationResult.of(scenario, fp32_profile, options.epochs, options.num_samples, options.most_ranks)


def _layer_times(options: PlanOptions, cluster: Cluster, module: nn.Module, inputs: Tensor) -> tuple[Profile, Profile]:
    """The profile that the options ask for, and the one in FP32 if the cluster says how much slower FP32 is."""
    if options.is_run:
        try:
            profile = measure_profile(module, inputs, None, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        except ARGUMENT_ERRORS as error:
            raise input_error(module, list(inputs.shape[1:]), error) from error
        return profile, profile
    peak, reference = peak_profile(module, inputs, cluster.device), cluster.reference
    if options.samples_per_s is not None:
        source = f"{peak.source}, scaled to the given {options.samples_per_s:g} samples/s"
        profile = peak.scaled(options.batch_size / options.samples_per_s / peak.compute_s)
    elif reference is not None:
        source = (
            f"{peak.source}, scaled by {reference.model}'s {reference.samples_per_s:g} samples/s at "
            f"{reference.batch_size} a rank"
        )
        reference_s = _reference_peak(cluster, reference).compute_s
        profile = peak.scaled(reference.batch_size / reference.samples_per_s / reference_s)
    else:
        raise PlanError(
            f"samples_per_s is not given and cluster {cluster.name!r} has no reference: give samples_per_s, or "
            "layer_times=measured"
        )
    profile = replace(profile, source=source)
    if reference is None or reference.fp32_samples_per_s is None:
        return profile, profile
    return profile, profile.scaled(reference.samples_per_s / reference.fp32_samples_per_s)


def _reference_peak(cluster: Cluster, reference: Reference) -> Profile:
    """The profile of the reference model on the cluster's device at its peaks."""
    try:
        with torch.device("meta"):
            module = build_model(reference.model, 1000)
    except ValueError as error:
        raise PlanError(f"cluster.reference.model: {error}") from error
    side = int(getattr(module, "image_size", 224))
    images = torch.empty(reference.batch_size, 3, side, side, device="meta")
    return peak_profile(module, images, cluster.device)
