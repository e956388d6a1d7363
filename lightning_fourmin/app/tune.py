"""`fourmin tune`: measures all-reduce on this cluster, writes the table, and says whether fourmin will help."""

import inspect
import os
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

from lightning_fourmin.app.job import external_rank
from lightning_fourmin.app.launch import RankError, run_ranks
from lightning_fourmin.app.net_tuner import NetTuner
from lightning_fourmin.app.verb import give_up, run
from lightning_fourmin.comm.advice import sentence_without_model
from lightning_fourmin.comm.curves import draw
from lightning_fourmin.comm.fusion import MIB
from lightning_fourmin.comm.groups import ProcessGroups
from lightning_fourmin.comm.table import AllReduceTable, cached_table_path
from lightning_fourmin.comm.topology import Topology
from lightning_fourmin.comm.tuner import measure_table
from lightning_fourmin.models import MODELS, build_model
from lightning_fourmin.options import WIRE_DTYPES

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
    num_classes: int = 1000
    image_size: int = 224
    batch_size: int = 32
    wire_dtype: str | None = None

    def check(self) -> None:
        for name in ("devices", "budget_s", "largest_mb", "num_classes", "image_size", "batch_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            raise ValueError(f"wire_dtype={self.wire_dtype} is not known: choose one of null, fp32, fp16, bf16")
        if self.model is not None:
            self.build_model()

    def build_model(self) -> nn.Module:
        assert self.model is not None
        takes_size = self.model in MODELS and "image_size" in inspect.signature(MODELS[self.model]).parameters
        return build_model(self.model, self.num_classes, **({"image_size": self.image_size} if takes_size else {}))


def main() -> None:
    run("tune", TuneOptions, _tune)


def _tune(options: TuneOptions) -> None:
    try:
        options.check()
        if external_rank() is None:
            run_ranks(tune_rank, asdict(options), options.devices)
        else:
            tune_rank(asdict(options))
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

    `net` is trained on random images to measure it; None: the model of the options, if there is one.
    """
    nodes = [0] * dist.get_world_size()
    dist.all_gather_object(nodes, node_rank)
    topology = Topology.build(nodes, options.group_size)
    groups = ProcessGroups.shared(TIMEOUT)
    with _progress("measuring all-reduce", options.budget_s) as progress:
        table = measure_table(
            topology,
            groups,
            device,
            int(options.largest_mb * MIB),
            options.budget_s,
            search=options.group_size is None,
            progress=progress,
        )
    path = Path(options.out) if options.out else cached_table_path(topology, table.backend)
    told = [str(table), f"links: {table.fit}"]
    if dist.get_rank() == 0:
        table.to_csv(path)
        draw(table, path.with_suffix(".svg"))
        told.append(f"table: {path}, picture: {path.with_suffix('.svg')}")
    if net is None and options.model is not None:
        net = options.build_model()
    if net is None:
        told.append(sentence_without_model(table))
    else:
        images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
        labels = torch.arange(options.batch_size, device=device) % options.num_classes
        wire_dtype = WIRE_DTYPES.get(options.wire_dtype or "")
        tuner = NetTuner(net.to(device), images, labels, table.groups_of(topology), table, groups, wire_dtype)
        told += tuner.tune(path, lambda what: _progress(what, options.budget_s), options.budget_s)
    if dist.get_rank() == 0:
        print("\n".join(told), flush=True)
    return table, told


def _started(options: TuneOptions) -> tuple[int, int]:
    """Ranks a node and nodes, as the launcher has started them, or as asked for."""
    if "LOCAL_WORLD_SIZE" in os.environ and external_rank() is not None:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if external_rank() is not None:
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
