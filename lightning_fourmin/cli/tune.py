"""`fourmin tune`: measures all-reduce on this cluster, writes the table, and says whether fourmin will help."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_fourmin.allreduce.buckets import MIB
from lightning_fourmin.allreduce.measure_table import measure_table
from lightning_fourmin.allreduce.plan import WIRE_DTYPES, CommOptions
from lightning_fourmin.allreduce.process_groups import ProcessGroups, from_rank_0, gather_objects
from lightning_fourmin.allreduce.table import AllReduceTable, cached_table_path, write_table
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.cli.build_net import named_model, own_module, sample_shape, unfit_input
from lightning_fourmin.cli.hydra_app import give_up, run
from lightning_fourmin.cli.spawn_ranks import Launch, run_ranks
from lightning_fourmin.errors import RankError
from lightning_fourmin.models import MODELS
from lightning_fourmin.simulate.roofline import UNFIT
from lightning_fourmin.tune.net import tune_net
from lightning_fourmin.tune.plot import draw
from lightning_fourmin.tune.verdict import sentence_without_model

TIMEOUT = timedelta(minutes=5)


@dataclass
class TuneOptions:
    """Fields as in conf/tune.yaml."""

    devices: int = 2
    accelerator: str = "auto"
    budget_s: float = 30.0
    largest_mb: float = 16.0
    group_size: int | None = None
    out: str | None = None
    model: str | None = None
    model_options: dict[str, Any] | None = None
    """model.model_options on the command line."""
    module: str | None = None
    module_options: dict[str, Any] | None = None
    input_shape: list[int] | None = None
    num_classes: int = 1000
    image_size: int | None = None
    batch_size: int = 32
    wire_dtype: str | None = None

    def check(self) -> None:
        for name in ("devices", "budget_s", "largest_mb", "num_classes", "image_size", "batch_size"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name}={value} must be above 0")
        if self.out is not None and (Path(self.out).suffix != ".csv" or Path(self.out).is_dir()):
            raise ValueError(f"out={self.out} must be a file whose name ends in .csv")
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            raise ValueError(f"wire_dtype={self.wire_dtype} is not known: choose one of null, fp32, fp16, bf16")
        net = self.build_net()
        if net is not None:
            shape = self.sample_shape(net)
            try:
                net(torch.randn(2, *shape))
            except UNFIT as error:
                raise unfit_input(net, shape, error) from error

    def build_net(self) -> nn.Module | None:
        """The net to tune for, if there is one."""
        if self.module is not None:
            if self.model is not None:
                raise ValueError(f"model={self.model} and module={self.module}: give one of them")
            return own_module(self.module, self.module_options)
        if self.model is None:
            return None
        takes_size = self.model in MODELS and "image_size" in inspect.signature(MODELS[self.model]).parameters
        size = {"image_size": self.image_size} if takes_size and self.image_size is not None else {}
        return named_model(self.model, self.num_classes, {**size, **(self.model_options or {})})

    def sample_shape(self, net: nn.Module) -> list[int]:
        return sample_shape(net, self.module is not None, self.input_shape, self.image_size)


def main() -> None:
    if {"-m", "--multirun"} & set(sys.argv):
        give_up("tune", "its jobs would write one table over the other: call it once for each, with out= of its own")
    run("tune", TuneOptions, _tune)


def _tune(options: TuneOptions) -> None:
    try:
        options.check()
        if Launch.detect().is_external:
            tune_rank(asdict(options))
        else:
            run_ranks(tune_rank, asdict(options), options.devices)
    except (ValueError, RankError) as error:
        give_up("tune", str(error))


def tune_rank(config: dict[str, Any]) -> None:
    """The work of one rank; who it is stands in the environment."""
    options = TuneOptions(**config)
    devices, num_nodes = _started(options)
    fabric = Fabric(accelerator=options.accelerator, devices=devices, num_nodes=num_nodes, strategy="ddp")
    fabric.launch()
    tune(options, fabric.node_rank, fabric.device)
    # Together: one whose peers have left with messages under way may be aborted by the backend.
    dist.barrier()
    dist.destroy_process_group()


def tune(
    options: TuneOptions, node_rank: int, device: torch.device, net: nn.Module | None = None
) -> tuple[AllReduceTable, list[str]]:
    """Measures and writes; rank 0 tells what was found. A collective call.

    `net` is measured on random inputs; None: that of the options, if there is one.
    """
    topology = Topology.build(gather_objects(node_rank), options.group_size)
    groups = ProcessGroups.shared(TIMEOUT)
    wire_dtype = WIRE_DTYPES.get(options.wire_dtype or "")
    path = Path(options.out) if options.out else cached_table_path(topology, dist.get_backend())
    # Now: a folder that cannot be made should not cost a measurement.
    from_rank_0(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    with _progress("measuring all-reduce", options.budget_s) as progress:
        table = measure_table(
            topology,
            groups,
            device,
            int(options.largest_mb * MIB),
            options.budget_s,
            wire_dtype,
            search=options.group_size is None,
            progress=progress,
        )
    told: list[str] = []

    def tell(*lines: str) -> None:
        told.extend(lines)
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)

    tell(str(table), f"links: {table.fit}")
    # Kept now, whatever becomes of the steps of a net.
    written = from_rank_0(lambda: _write(table, path))
    net = options.build_net() if net is None else net
    if net is None:
        tell(written, sentence_without_model(table))
    else:
        inputs = torch.randn(options.batch_size, *options.sample_shape(net), device=device)
        table, lines = tune_net(
            net.to(device),
            inputs,
            topology,
            table,
            groups,
            CommOptions(wire_dtype=options.wire_dtype, group_size=options.group_size),
            lambda what: _progress(what, options.budget_s),
            options.budget_s,
        )
        tell(*lines[:-1], from_rank_0(lambda: _write(table, path)), lines[-1])
    return table, told


def _write(table: AllReduceTable, path: Path) -> str:
    picture = path.with_suffix(".svg")
    write_table(table, path)
    draw(table, picture)
    return f"table: {path}, picture: {picture}"


def _started(options: TuneOptions) -> tuple[int, int]:
    """Ranks a node and nodes, as the launcher has started them, or as asked for."""
    launch = Launch.detect()
    if launch.by == "torchrun":
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if launch.by == "srun":
        num_nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // num_nodes, num_nodes
    return options.devices, 1


@contextmanager
def _progress(what: str, budget_s: float) -> Iterator[Callable[[float], object]]:
    """A bar on rank 0 that fills as the budget is spent."""
    if dist.get_rank() != 0:
        yield lambda share: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), TimeElapsedColumn(), TextColumn(f"of {budget_s:g} s"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share: bar.update(task, completed=share)
