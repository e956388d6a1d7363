"""`fourmin tune` behind the command line: its options, and what all ranks do together.

measure all-reduce  ->  table (CSV)  ->  with a net: real steps with several plans  ->  table with the fastest one
                                         without: a sentence on what the table promises
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fourmin.allreduce.buckets import MIB
from lightning_fourmin.allreduce.measure_table import measure_table
from lightning_fourmin.allreduce.plan import WIRE_DTYPES, CommOptions
from lightning_fourmin.allreduce.process_groups import ProcessGroups, from_rank_0, gather_objects
from lightning_fourmin.allreduce.table import AllReduceTable, cached_table_path, write_table
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import ConfigError
from lightning_fourmin.files import check_writable
from lightning_fourmin.tune.net import tune_net
from lightning_fourmin.tune.plot import draw
from lightning_fourmin.tune.verdict import sentence_without_model

TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other before they give up."""

MakeNet = Callable[[], tuple[nn.Module, Tensor]]
"""A function that makes a net and a batch of inputs for it, both on the CPU."""


@dataclass
class TuneOptions:
    """The options of `fourmin tune`; conf/tune.yaml explains each. A value that makes no sense is a ConfigError.

    Those from `model` to `image_size` describe the net, which the command line builds.
    """

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

    def __post_init__(self) -> None:
        for name in ("devices", "budget_s", "largest_mb", "num_classes", "image_size", "batch_size"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name}={value} must be above 0")
        if self.out is not None and (Path(self.out).suffix != ".csv" or Path(self.out).is_dir()):
            raise ConfigError(f"out={self.out} must be a file whose name ends in .csv")
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            raise ConfigError(f"wire_dtype={self.wire_dtype} is not known: choose one of null, fp32, fp16, bf16")
        if self.model is not None and self.module is not None:
            raise ConfigError(f"model={self.model} and module={self.module}: give one of them")

    @property
    def has_net(self) -> bool:
        """Whether there is a net to tune for."""
        return self.model is not None or self.module is not None


def tune(
    options: TuneOptions, node_rank: int, device: torch.device, make_net: MakeNet | None = None
) -> tuple[AllReduceTable, list[str]]:
    """Measures the all-reduces and the steps of a net, and writes table and picture; a collective call.

    Returns the table and, on all ranks, the lines that rank 0 has printed. Without `make_net` no steps are measured.
    """
    topology = Topology.build(gather_objects(node_rank), options.group_size)
    groups = ProcessGroups.shared(TIMEOUT)
    wire_dtype = WIRE_DTYPES.get(options.wire_dtype or "")
    path = Path(options.out) if options.out else cached_table_path(topology, dist.get_backend())
    from_rank_0(lambda: check_writable(path.parent))
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
    printed: list[str] = []

    def say(*lines: str) -> None:
        printed.extend(lines)
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)

    say(str(table), f"links: {table.fit}")
    # The table is written before the steps of the net, too, which may fail.
    written = from_rank_0(lambda: _write(table, path))
    if make_net is None:
        say(written, sentence_without_model(table))
        return table, printed
    net, inputs = make_net()
    comm_options = CommOptions(wire_dtype=options.wire_dtype, group_size=options.group_size)
    with _progress("measuring steps", options.budget_s) as progress:
        table, lines = tune_net(
            net.to(device), inputs.to(device), topology, table, groups, comm_options, options.budget_s, progress
        )
    say(*lines[:-1], from_rank_0(lambda: _write(table, path)), lines[-1])
    return table, printed


def _write(table: AllReduceTable, path: Path) -> str:
    """Writes the table and, beside it, its picture; returns a line that says where they are."""
    picture = path.with_suffix(".svg")
    write_table(table, path)
    draw(table, picture)
    return f"table: {path}, picture: {picture}"


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
