"""Which table a run uses: the file that was asked for, the cached one, one measured now, or the cost model's."""

from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fourmin.comm.groups import ProcessGroups
from lightning_fourmin.comm.table import AllReduceTable, cached_table_path
from lightning_fourmin.comm.topology import Topology
from lightning_fourmin.comm.tuner import measure_table

AUTO_BUDGET_S = 5.0


def choose_table(
    asked: str | Path | None, topology: Topology, groups: ProcessGroups, device: torch.device, largest_bytes: int
) -> AllReduceTable:
    """Rank 0 reads or computes the table; all ranks get that one, or its error."""
    found: list[AllReduceTable | ValueError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [_find(asked, topology)]
        except ValueError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0)
    table = found[0]
    if isinstance(table, ValueError):
        raise table
    if table is None:
        rank_zero_info(f"fourmin: measuring the all-reduce for {AUTO_BUDGET_S:g} s (table='auto', kept for later runs)")
        table = measure_table(topology, groups, device, largest_bytes, AUTO_BUDGET_S)
        if dist.get_rank() == 0:
            table.to_csv(cached_table_path(topology, table.backend))
    return table


def _find(asked: str | Path | None, topology: Topology) -> AllReduceTable | None:
    """The table that the user asked for; None if it has to be measured."""
    backend = dist.get_backend()
    cached = cached_table_path(topology, backend)
    if asked not in (None, "auto"):
        return AllReduceTable.from_csv(Path(asked), topology, backend)
    if cached.exists():
        return AllReduceTable.from_csv(cached, topology, backend)
    return None if asked == "auto" else AllReduceTable.from_cost_model(topology, backend)
