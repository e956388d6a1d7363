"""`fourmin plan`: predicts a training step on a cluster, the best settings for it, and how it scales."""

from contextlib import nullcontext
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from torch import Tensor, nn

from lightning_fourmin.cli.build_net import named_model, own_module, sample_shape
from lightning_fourmin.cli.hydra_app import run
from lightning_fourmin.files import check_writable
from lightning_fourmin.simulate.layer_profile import input_error
from lightning_fourmin.simulate.predict import PlanOptions, predict


def main() -> None:
    """Runs the verb with the options of the command line."""
    run("plan", PlanOptions, _plan)


def _plan(options: PlanOptions) -> None:
    hydra = HydraConfig.get()
    folder = None if options.out is None else Path(options.out)
    if folder is not None:
        if hydra.mode == RunMode.MULTIRUN:
            folder /= str(hydra.job.num)
        check_writable(folder)
    result = predict(options, *net_and_inputs(options))
    print(result)
    if folder is not None:
        result.write(folder)
        print(f"\nwritten: plan.json, plan.svg and trace.json in {folder}")


def net_and_inputs(options: PlanOptions) -> tuple[nn.Module, Tensor]:
    """The net that the options name and a batch of inputs; both without values unless the net is to be run."""
    with nullcontext() if options.is_run else torch.device("meta"):
        if options.module is None:
            module = named_model(options.model, options.num_classes, options.model_options)
        else:
            hint = "" if options.is_run else "; if it computes with weights, try layer_times=measured"
            module = own_module(options.module, options.module_options, hint)
        shape = sample_shape(module, options.module is not None, options.input_shape)
        try:
            # On the meta device `empty` says more clearly than `randn` what is wrong with a shape.
            return module, (torch.randn if options.is_run else torch.empty)(options.batch_size, *shape)
        except RuntimeError as error:
            raise input_error(module, shape, error) from error
