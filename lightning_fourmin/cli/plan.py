"""`fourmin plan`: predicts a training step on a cluster, the best settings for it, and how it scales."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from torch import nn

from lightning_fourmin.allreduce.plan import WIRE_DTYPES
from lightning_fourmin.cli.build_net import named_model, own_module, sample_shape, unfit_input
from lightning_fourmin.cli.hydra_app import run
from lightning_fourmin.errors import PlanError
from lightning_fourmin.models import build_model
from lightning_fourmin.simulate.cluster import Cluster
from lightning_fourmin.simulate.layer_profile import Profile, measure_profile
from lightning_fourmin.simulate.measured_cluster import with_table
from lightning_fourmin.simulate.result import Outlook
from lightning_fourmin.simulate.roofline import UNFIT, peak_profile
from lightning_fourmin.simulate.scenario import Scenario
from lightning_fourmin.simulate.stragglers import Stragglers


@dataclass
class PlanOptions:
    """Fields as in conf/plan.yaml."""

    model: str = "resnet50"
    model_options: dict[str, Any] | None = None
    """model.model_options on the command line."""
    cluster: dict[str, Any] = field(default_factory=dict)
    module: str | None = None
    module_options: dict[str, Any] | None = None
    input_shape: list[int] | None = None
    num_classes: int = 1000
    batch_size: int = 64
    num_ranks: int = 1024
    most_ranks: int = 4096
    layer_times: str = "scaled"
    samples_per_s: float | None = None
    table: str | None = None
    algorithm: str = "hybrid"
    group_size: int | None = None
    fusion_mb: float | None = None
    switch_mb: float | None = None
    wire_dtype: str = "fp16"
    stragglers: Stragglers = field(default_factory=Stragglers)
    epochs: int = 90
    num_samples: int = 1281167
    out: str | None = "plan"


def main() -> None:
    run("plan", PlanOptions, _plan)


def _plan(options: PlanOptions) -> None:
    outlook = predict(options)
    print(outlook)
    if options.out is not None:
        hydra, folder = HydraConfig.get(), Path(options.out)
        if hydra.mode == RunMode.MULTIRUN:
            folder /= str(hydra.job.num)
        outlook.write(folder)
        print(f"\nwritten: plan.json, plan.svg and trace.json in {folder}")


def predict(options: PlanOptions) -> Outlook:
    """The outlook for some options; raises PlanError where they make no sense."""
    for name in ("batch_size", "num_ranks", "most_ranks", "num_classes", "epochs", "num_samples"):
        if getattr(options, name) < 1:
            raise PlanError(f"{name}={getattr(options, name)} must be at least 1")
    for name in ("samples_per_s", "switch_mb"):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise PlanError(f"{name}={value:g} must be above 0")
    if options.fusion_mb is not None and options.fusion_mb < 0:
        raise PlanError(f"fusion_mb={options.fusion_mb:g} must be 0 (every gradient alone) or more")
    if options.wire_dtype not in WIRE_DTYPES:
        raise PlanError(f"wire_dtype={options.wire_dtype} is not known: choose one of {', '.join(WIRE_DTYPES)}")
    if options.switch_mb is not None and options.algorithm != "hybrid":
        raise PlanError(
            f"switch_mb={options.switch_mb:g} is the switch of algorithm=hybrid, but algorithm={options.algorithm}: "
            "drop one"
        )
    cluster, table = Cluster.from_config(options.cluster), None
    if options.table is not None:
        cluster, table = with_table(cluster, Path(options.table))
    # Shapes are enough, unless it is to be run.
    is_run = options.layer_times == "measured"
    with nullcontext() if is_run else torch.device("meta"):
        if options.module is None:
            module = named_model(options.model, options.num_classes, options.model_options)
        else:
            hint = "" if is_run else "; if it computes with weights, try layer_times=measured"
            module = own_module(options.module, options.module_options, hint)
    profile, fp32_profile = _profiles(options, cluster, module)
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
    return Outlook.of(scenario, fp32_profile, options.epochs, options.num_samples, options.most_ranks)


def _profiles(options: PlanOptions, cluster: Cluster, module: nn.Module) -> tuple[Profile, Profile]:
    """Layer times as asked for, and those in FP32 where the cluster knows how much slower that is."""
    if options.layer_times == "measured":
        sgd, shape = partial(torch.optim.SGD, lr=0.1, momentum=0.9), _input_shape(options, module)
        try:
            profile = measure_profile(module, torch.randn(options.batch_size, *shape), None, sgd)
        except UNFIT as error:
            raise unfit_input(module, shape, error) from error
        return profile, profile
    if options.layer_times != "scaled":
        raise PlanError(f"layer_times={options.layer_times} is not known: choose scaled or measured")
    peak = _peak(module, options.batch_size, options, cluster)
    known = cluster.reference
    if options.samples_per_s is not None:
        source = f"{peak.source}, scaled to the given {options.samples_per_s:g} samples/s"
        profile = peak.scaled(options.batch_size / options.samples_per_s / peak.compute_s)
    elif known is not None:
        source = (
            f"{peak.source}, scaled by {known.model}'s {known.samples_per_s:g} samples/s at {known.batch_size} a rank"
        )
        like = replace(options, model=known.model, module=None, input_shape=None, num_classes=1000)
        reference = _peak(_reference(known.model), known.batch_size, like, cluster)
        profile = peak.scaled(known.batch_size / known.samples_per_s / reference.compute_s)
    else:
        raise PlanError(
            f"samples_per_s is not given and cluster {cluster.name!r} has no reference: give samples_per_s, or "
            "layer_times=measured"
        )
    profile = replace(profile, source=source)
    if known is None or known.fp32_samples_per_s is None:
        return profile, profile
    return profile, profile.scaled(known.samples_per_s / known.fp32_samples_per_s)


def _reference(name: str) -> nn.Module:
    try:
        with torch.device("meta"):
            return build_model(name, 1000)
    except ValueError as error:
        raise PlanError(f"cluster.reference.model: {error}") from error


def _peak(module: nn.Module, batch_size: int, options: PlanOptions, cluster: Cluster) -> Profile:
    shape = _input_shape(options, module)
    try:
        inputs = torch.empty(batch_size, *shape, device="meta")
    except RuntimeError as error:
        raise unfit_input(module, shape, error) from error
    return peak_profile(module, inputs, cluster.device)


def _input_shape(options: PlanOptions, module: nn.Module) -> list[int]:
    return sample_shape(module, options.module is not None, options.input_shape)
