"""`fourmin tune`: measures all-reduce on this cluster, writes the table, and says whether fourmin will help."""

import inspect
import os
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_fourmin.cli.build_net import named_model, own_module, sample_shape
from lightning_fourmin.cli.hydra_app import give_up, run
from lightning_fourmin.cli.spawn_ranks import Launch, run_ranks
from lightning_fourmin.errors import RankError
from lightning_fourmin.models import MODELS
from lightning_fourmin.simulate.layer_profile import ARGUMENT_ERRORS, input_error
from lightning_fourmin.tune.tuner import TuneOptions, tune


def main() -> None:
    """Runs the verb with the options of the command line."""
    if {"-m", "--multirun"} & set(sys.argv):
        give_up("tune", "its jobs would write one table over the other: call it once for each, with out= of its own")
    run("tune", TuneOptions, _tune)


def _tune(options: TuneOptions) -> None:
    try:
        check_net(options)
        if Launch.detect().is_external:
            tune_rank(asdict(options))
        else:
            run_ranks(tune_rank, asdict(options), options.devices)
    except (ValueError, RankError) as error:
        give_up("tune", str(error))


def tune_rank(config: dict[str, Any]) -> None:
    """The work of one rank; the environment says which rank it is."""
    options = TuneOptions(**config)
    devices, num_nodes = _started(options)
    fabric = Fabric(accelerator=options.accelerator, devices=devices, num_nodes=num_nodes, strategy="ddp")
    fabric.launch()
    tune(options, fabric.node_rank, fabric.device, partial(net_and_inputs, options) if options.has_net else None)
    # Ranks leave together: the backend may abort one whose peers are gone while its messages are in flight.
    dist.barrier()
    dist.destroy_process_group()


def net_and_inputs(options: TuneOptions) -> tuple[nn.Module, Tensor]:
    """The net that the options name, and a batch of random inputs for it."""
    net, shape = _net_and_shape(options)
    return net, torch.randn(options.batch_size, *shape)


def check_net(options: TuneOptions) -> None:
    """Raises PlanError for a net that cannot be made or run, before ranks are started for it."""
    if options.has_net:
        net, shape = _net_and_shape(options)
        try:
            net(torch.randn(2, *shape))
        except ARGUMENT_ERRORS as error:
            raise input_error(net, shape, error) from error


def _net_and_shape(options: TuneOptions) -> tuple[nn.Module, list[int]]:
    """The net and the shape of one sample for it."""
    if options.module is not None:
        net = own_module(options.module, options.module_options)
    else:
        assert options.model is not None
        takes_size = options.model in MODELS and "image_size" in inspect.signature(MODELS[options.model]).parameters
        size = {"image_size": options.image_size} if takes_size and options.image_size is not None else {}
        net = named_model(options.model, options.num_classes, {**size, **(options.model_options or {})})
    return net, sample_shape(net, options.module is not None, options.input_shape, options.image_size)


def _started(options: TuneOptions) -> tuple[int, int]:
    """The number of ranks a node and of nodes: as the launcher started them, else as the options ask."""
    launch = Launch.detect()
    if launch.by == "torchrun":
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if launch.by == "srun":
        num_nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // num_nodes, num_nodes
    return options.devices, 1
