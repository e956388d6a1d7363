"""Which table and cuts a run uses: the file that was asked for, the cached one, one measured now, or none.

Without a table the cost model makes one; without cuts the fusion threshold does.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_fourmin.allreduce.broadcast_object import from_rank_0
from lightning_fourmin.allreduce.cuts import Cuts, cuts_path, read_cuts
from lightning_fourmin.allreduce.measure_table import measure_table
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.allreduce.table_csv import cached_table_path, read_table, write_table
from lightning_fourmin.allreduce.topology import Topology

AUTO_BUDGET_S = 5.0


def choose_table(
    asked: str | Path | None,
    topology: Topology,
    groups: ProcessGroups,
    device: torch.device,
    largest_bytes: int,
    wire_dtype: torch.dtype | None = None,
    any_groups: bool = False,
) -> AllReduceTable:
    """Rank 0 reads or computes the table; all ranks get that one, or its error.

    `any_groups`: a table may bring groups that its tuner found better than those of the topology.
    """
    table = from_rank_0(lambda: _find(asked, topology, any_groups))
    if table is None:
        rank_zero_info(f"fourmin: measuring the all-reduce for {AUTO_BUDGET_S:g} s (table='auto', kept for later runs)")
        table = measure_table(topology, groups, device, largest_bytes, AUTO_BUDGET_S, wire_dtype)
        if dist.get_rank() == 0:
            path = cached_table_path(topology, table.backend)
            try:
                write_table(table, path)
            except OSError as error:
                rank_zero_warn(f"the table is not kept for later runs: {path}: {error.strerror}")
    return table


def choose_cuts(
    asked: str | Path | None, topology: Topology, parameters: Sequence[tuple[str, nn.Parameter]]
) -> Cuts | None:
    """What `fourmin tune` found for a module on such nodes, beside the table; None if it was never asked."""
    cuts = from_rank_0(lambda: read_cuts(cuts_path(_path(asked, topology), parameters)))
    # Of a file that was used for other nodes before. Groups may be others, as those of the table.
    if cuts is not None and cuts.topology_key is not None and _nodes(cuts.topology_key) != _nodes(topology.key):
        return None
    return cuts


def _nodes(topology_key: str) -> str:
    return topology_key.partition("_groups")[0]


def _path(asked: str | Path | None, topology: Topology) -> Path:
    """Where the table of a run is, if it is in a file."""
    return Path(asked) if asked not in (None, "auto") else cached_table_path(topology, dist.get_backend())


def _find(asked: str | Path | None, topology: Topology, any_groups: bool) -> AllReduceTable | None:
    """The table that the user asked for; None if it has to be measured."""
    backend, path = dist.get_backend(), _path(asked, topology)
    if asked not in (None, "auto") or os.path.exists(path):  # False, too, where it may not be looked for
        return read_table(path, topology, backend, any_groups)
    return None if asked == "auto" else AllReduceTable.from_cost_model(topology, backend)
