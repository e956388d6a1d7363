"""A cluster as its config file describes it, or as `fourmin tune` has measured it: nodes, links and one device."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lightning_fourmin.allreduce.cost import Link, Links
from lightning_fourmin.allreduce.fit_links import fit_links
from lightning_fourmin.allreduce.table import AllReduceTable, read_table
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.roofline import Device


@dataclass(frozen=True)
class Reference:
    """The published throughput of one model on one device; that of other models follows from FLOPs and bytes."""

    model: str
    batch_size: int
    samples_per_s: float
    fp32_samples_per_s: float | None
    """The throughput in FP32, if it is known; `samples_per_s` is the throughput with 16-bit tensors."""


@dataclass(frozen=True)
class Cluster:
    """Any number of nodes with the same hardware."""

    name: str
    backend: str
    ranks_per_node: int
    links: Links
    host: Link | None
    """The time that an all-reduce takes from the cores that compute, as latency and rate; None if ranks are on GPUs."""
    device: Device
    reference: Reference | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Cluster":
        """The cluster that the content of a file of conf/cluster describes; an error names the field."""
        fields = _Fields(config, f"cluster {config.get('name', 'without a name')!r}")
        links = Links(
            fields.link("inside"),
            fields.link("inside_backend" if config.get("inside_backend") else "inside"),
            fields.link("between"),
            1 / (1e9 * fields.positive("reduce_gb_per_s")),
            fields.whole("nics_per_node"),
        )
        return cls(
            str(fields.value("name")),
            str(fields.value("backend")),
            fields.whole("ranks_per_node"),
            links,
            fields.link("host") if config.get("host") else None,
            Device(fields.positive("device.tflops"), fields.positive("device.memory_gb_per_s")),
            fields.reference() if config.get("reference") else None,
        )

    def measured(self, path: Path) -> tuple["Cluster", AllReduceTable]:
        """This cluster with what a table of `fourmin tune` tells about it, and that table.

        The number of ranks on a node and the backend are those of the table, and links are fitted to its times. A link
        that the ranks of the table did not use stays as it is.
        """
        table, topology = _read(path)
        num_ranks_of_nodes = {topology.node_of.count(node) for node in topology.node_of}
        if len(num_ranks_of_nodes) > 1:
            raise PlanError(
                f"table={path} is of nodes with {sorted(num_ranks_of_nodes)} ranks: a plan needs nodes alike"
            )
        fit = fit_links(table, topology)
        names = [name for name in ("inside", "inside_backend", "between") if name not in fit.fitted]
        if "between" in names:
            # The table is of one node.
            names.append("num_nics")
        kept: dict[str, Any] = {name: getattr(self.links, name) for name in names}
        cluster = replace(
            self,
            name=f"{path.name} ({fit})",
            backend=table.backend,
            ranks_per_node=num_ranks_of_nodes.pop(),
            links=replace(fit.links, **kept),
        )
        return cluster, table

    def topology(self, num_ranks: int, group_size: int | None = None) -> Topology:
        """The topology of so many ranks: every node but the last is full, and each node is a group by default."""
        if group_size is not None and not 1 <= group_size <= num_ranks:
            raise PlanError(
                f"group_size={group_size} does not fit into num_ranks={num_ranks}: choose 1 to {num_ranks}, or leave "
                "it out for the ranks of a node"
            )
        return _topology(num_ranks, self.ranks_per_node, group_size)


@cache
def _topology(num_ranks: int, ranks_per_node: int, group_size: int | None) -> Topology:
    """A topology of full nodes, kept because a search asks for the same thousands of ranks again and again."""
    return Topology.build([rank // ranks_per_node for rank in range(num_ranks)], group_size)


def _read(path: Path) -> tuple[AllReduceTable, Topology]:
    """The table in a file, and the topology that the head of the file names."""
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
    if table.group_size is None and topology.key != Topology.build(topology.node_of).key:
        # The user gave the tuner a group_size. The table names only one that the tuner has found by itself.
        table = replace(table, group_size=topology.largest_group)
    return table, topology


class _Fields:
    """The values of a config, checked; a path such as `device.tflops` names a value inside another."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def value(self, path: str) -> Any:
        """The value of a field of any type, which must not be missing."""
        found: Any = self._config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
            if found is None:
                raise PlanError(f"{self._where}: {path} is missing; conf/cluster/p40_100gbe.yaml shows all fields")
        return found

    def number(self, path: str) -> float:
        """A finite number."""
        value = self.value(path)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PlanError(f"{self._where}: {path}={value!r} is not a number")
        return float(value)

    def positive(self, path: str) -> float:
        """A number above 0."""
        if (value := self.number(path)) <= 0:
            raise PlanError(f"{self._where}: {path}={value:g} must be above 0")
        return value

    def whole(self, path: str) -> int:
        """A whole number above 0."""
        if (value := self.positive(path)) != int(value):
            raise PlanError(f"{self._where}: {path}={value:g} must be a whole number")
        return int(value)

    def link(self, path: str) -> Link:
        """A link, from its latency in microseconds and its rate in GB/s."""
        if (latency_us := self.number(f"{path}.latency_us")) < 0:
            raise PlanError(f"{self._where}: {path}.latency_us={latency_us:g} must be 0 or more")
        return Link(1e-6 * latency_us, 1 / (1e9 * self.positive(f"{path}.gb_per_s")))

    def reference(self) -> Reference:
        """The reference model with its throughput."""
        model = str(self.value("reference.model"))
        fp32_is_known = self._config["reference"].get("fp32_samples_per_s") is not None
        return Reference(
            model,
            self.whole("reference.batch_size"),
            self.positive("reference.samples_per_s"),
            self.positive("reference.fp32_samples_per_s") if fp32_is_known else None,
        )
