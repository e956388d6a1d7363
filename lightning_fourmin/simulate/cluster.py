"""A cluster as its config file describes it: ranks a node, links, and one device with a known throughput."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lightning_fourmin.allreduce.cost import Link, Links
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.roofline import Device


@dataclass(frozen=True)
class Reference:
    """The throughput of one device, from which those of other models follow by FLOPs and bytes."""

    model: str
    batch_size: int
    samples_per_s: float
    fp32_samples_per_s: float | None


@dataclass(frozen=True)
class Cluster:
    """Nodes alike, as many as the ranks need."""

    name: str
    backend: str
    ranks_per_node: int
    links: Links
    host: Link | None
    device: Device
    reference: Reference | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Cluster":
        """Reads a file of conf/cluster; an error names the field."""
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

    def topology(self, num_ranks: int, group_size: int | None = None) -> Topology:
        if num_ranks < 1:
            raise PlanError(f"num_ranks={num_ranks} must be at least 1")
        if group_size is not None and not 1 <= group_size <= num_ranks:
            raise PlanError(
                f"group_size={group_size} does not fit into num_ranks={num_ranks}: choose 1 to {num_ranks}, or leave "
                "it out for the ranks of a node"
            )
        return _topology(num_ranks, self.ranks_per_node, group_size)


@cache
def _topology(num_ranks: int, ranks_per_node: int, group_size: int | None) -> Topology:
    """A search looks at the same thousands of ranks again and again."""
    return Topology.build([rank // ranks_per_node for rank in range(num_ranks)], group_size)


class _Fields:
    """Checked access to the values of a config, `device.tflops` for one inside another."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def value(self, path: str) -> Any:
        found: Any = self._config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
            if found is None:
                raise PlanError(f"{self._where}: {path} is missing; conf/cluster/p40_100gbe.yaml shows all fields")
        return found

    def number(self, path: str) -> float:
        value = self.value(path)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PlanError(f"{self._where}: {path}={value!r} is not a number")
        return float(value)

    def positive(self, path: str) -> float:
        if (value := self.number(path)) <= 0:
            raise PlanError(f"{self._where}: {path}={value:g} must be above 0")
        return value

    def whole(self, path: str) -> int:
        if (value := self.positive(path)) != int(value):
            raise PlanError(f"{self._where}: {path}={value:g} must be a whole number")
        return int(value)

    def link(self, path: str) -> Link:
        if (latency_us := self.number(f"{path}.latency_us")) < 0:
            raise PlanError(f"{self._where}: {path}.latency_us={latency_us:g} must be 0 or more")
        return Link(1e-6 * latency_us, 1 / (1e9 * self.positive(f"{path}.gb_per_s")))

    def reference(self) -> Reference:
        model = str(self.value("reference.model"))
        known = self._config["reference"].get("fp32_samples_per_s") is not None
        return Reference(
            model,
            self.whole("reference.batch_size"),
            self.positive("reference.samples_per_s"),
            self.positive("reference.fp32_samples_per_s") if known else None,
        )
