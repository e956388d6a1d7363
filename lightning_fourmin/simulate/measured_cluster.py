"""A cluster as `fourmin tune` measured it: its table, and the links that explain the table."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_fourmin.allreduce.fit_links import fit_links
from lightning_fourmin.allreduce.table import AllReduceTable, read_table
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.cluster import Cluster


def with_table(cluster: Cluster, path: Path) -> tuple[Cluster, AllReduceTable]:
    """The cluster with nodes, backend and the links of a measured table that it tells about, and that table."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"table={path} cannot be read ({error}): give a CSV that fourmin tune has written") from error
    head = dict(re.findall(r"^# (\w+): (.+)$", text, re.MULTILINE))
    if "topology_key" not in head:
        raise PlanError(f"table={path} does not say for which topology it is: give a CSV that fourmin tune has written")
    try:
        topology = Topology.from_key(head["topology_key"])
        table = read_table(path, topology, head.get("backend", ""))
    except ValueError as error:
        raise PlanError(str(error)) from error
    sizes = {topology.node_of.count(node) for node in topology.node_of}
    if len(sizes) > 1:
        raise PlanError(f"table={path} is of nodes with {sorted(sizes)} ranks: a plan needs nodes alike")
    if table.group_size is None and topology.key != Topology.build(topology.node_of).key:
        table = replace(table, group_size=topology.largest_group)  # given to the tuner, not found by it
    fit = fit_links(table, topology)
    known = cluster.links
    unseen: dict[str, Any] = {
        name: getattr(known, name) for name in ("inside", "inside_backend") if name not in fit.fitted
    }
    if "between" not in fit.fitted:  # it is of one node
        unseen |= {"between": known.between, "num_nics": known.num_nics}
    links = replace(fit.links, **unseen)
    name = f"{path.name} ({fit})"
    measured = replace(cluster, name=name, backend=table.backend, ranks_per_node=sizes.pop(), links=links)
    return measured, table
