"""`run.json`, the record of a run: what was run, on what, and how it ended; a training writes it, its report reads it.

cli/train.py says which process writes it and when. A file is replaced as a whole, so that readers find a complete one.
"""

import json
import math
import os
import platform
import re
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from lightning_fourmin.allreduce.plan import PlanRow
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.errors import RunError
from lightning_fourmin.files import write_whole

RUN_NAME = "run.json"
ERROR_NAME = "error.txt"
FORMAT = 1
PACKAGES = ("lightning-fourmin", "torch", "lightning", "torchmetrics", "webdataset", "hydra-core", "numpy")
"""The packages whose versions are recorded, beside that of Python."""
Status = Literal["running", "done", "failed", "interrupted", "preempted"]
"""The state of a run. Ctrl-C makes it interrupted, SIGTERM makes it preempted."""


@dataclass(frozen=True)
class Hardware:
    """The machine of rank 0."""

    cpu: str
    cores: int
    memory_gb: float
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSize:
    """The net that was trained, its parameters and the tensors that hold them."""

    name: str
    num_parameters: int
    num_tensors: int


@dataclass(frozen=True)
class BucketRecord:
    """One row of the communication plan: gradients that travelled together, and how.

    In a run of one rank, which sends nothing, the fields on how they travelled are None.
    """

    num_tensors: int
    num_bytes: int
    """The bytes of the gradients in their own dtype."""
    dtype: str
    first: str
    last: str
    wire_bytes: int | None = None
    wire_dtype: str | None = None
    form: str | None = None
    algorithm: str | None = None
    num_pieces: int | None = None
    expected_ms: float | None = None
    """The time that the table expects the all-reduce to take by itself."""
    exactness: str | None = None
    """How the mean compares with that of plain DDP."""

    @classmethod
    def of(cls, row: PlanRow, is_sent: bool = True) -> "BucketRecord":
        """The record of a row of the plan; on one rank nothing is sent."""
        content = row.as_dict()
        return cls(**{one.name: content[one.name] for one in fields(cls) if is_sent or one.default is MISSING})


@dataclass(frozen=True)
class TableRowRecord:
    """One size of the all-reduce table: the time of each algorithm, and the one that was chosen."""

    num_bytes: int
    milliseconds: dict[str, float]
    choice: str


@dataclass(frozen=True)
class TableRecord:
    """The all-reduce table that the run used, and what it chose at each size."""

    source: str
    topology_key: str
    backend: str
    rows: tuple[TableRowRecord, ...]

    @classmethod
    def of(cls, table: AllReduceTable) -> "TableRecord":
        """The record of a table with its choices."""
        rows = [TableRowRecord(n.num_bytes, dict(n.milliseconds), table.choose(n.num_bytes)) for n in table.rows]
        return cls(table.source, table.topology_key, table.backend, tuple(rows))


@dataclass(frozen=True)
class Summary:
    """The figures that a run ends with. A field is None if the run did not get that far or nothing measured it."""

    top1: float | None = None
    top5: float | None = None
    val_loss: float | None = None
    epochs: int | None = None
    steps: int | None = None
    images_per_s: float | None = None
    S: float | None = None
    N: int | None = None
    e: float | None = None
    e_low: float | None = None
    e_high: float | None = None
    step_ms: float | None = None
    exposed_ms: float | None = None
    skipped_steps: int | None = None
    loss_scale: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """One training; `dataclasses.replace` makes the record of its end from that of its start.

    `versions` and `hardware` are those of the newest start, like `command` and `started`.
    """

    name: str
    """The name of the experiment."""
    command: str
    started: str
    """The time of the start in ISO 8601, with its time zone."""
    versions: dict[str, str]
    hardware: Hardware
    seconds: float | None = None
    """The time that all parts of a resumed run have taken together, without parts that were killed."""
    status: Status = "running"
    error: str | None = None
    arithmetic: tuple[str, ...] = ()
    """Sentences on batch, rate and schedule."""
    model: ModelSize | None = None
    topology: str | None = None
    world_size: int | None = None
    fusion_plan: tuple[BucketRecord, ...] | None = None
    table: TableRecord | None = None
    summary: Summary = field(default_factory=Summary)
    overrides: tuple[str, ...] = ()
    """The settings of a job as `key=value`; empty for a run that no sweep has started."""
    arguments: tuple[str, ...] = ()
    """What the config was composed with: the arguments of the command, and those of the run that it resumed."""

    def write(self, folder: Path) -> None:
        """Writes the record, complete or not at all; numbers that are not finite become null."""
        content = {"format": FORMAT, **_finite(asdict(self))}
        write_whole(folder / RUN_NAME, json.dumps(content, indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """The record in a folder; RunError names the file, and the field where one is wrong."""
        path = folder / RUN_NAME
        if not path.is_file():
            raise RunError(f"{path} does not exist: name a folder that `fourmin train` made, of a run or of a sweep")
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        if not isinstance(content, dict) or "format" not in content:
            raise RunError(f"{path} has no field format: `fourmin train` did not write it")
        if content["format"] != FORMAT:
            raise RunError(f"{path} has format {content['format']}, but this version reads format {FORMAT}")
        try:
            record: RunRecord = _parse(cls, content, "")
        except RunError as error:
            raise RunError(f"{path}: {error}") from error
        return record


def _finite(value: Any) -> Any:
    """The value without NaN and infinity, which JSON does not have and readers other than Python's refuse."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(kind: Any, value: Any, name: str) -> Any:
    """A value of JSON as a field of the type `kind`; `name` is the path of the field, for the error."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _parse(parts[0], value, name)
    if is_dataclass(kind) and isinstance(value, dict):
        return _parse_fields(kind, value, f"{name}." if name else "")
    if origin is tuple and isinstance(value, list):
        return tuple(_parse(parts[0], part, f"{name}[{index}]") for index, part in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _parse(parts[1], part, f"{name}.{key}") for key, part in value.items()}
    if origin is Literal and value in parts:
        return value
    # JSON writes 4.0 as 4 in other languages; true is not a number, though Python's bool is an int.
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is kind:
        return value
    wanted = f"one of {', '.join(parts)}" if origin is Literal else _JSON_NAMES.get(origin or kind, "an object")
    raise RunError(f"field {name} is {json.dumps(value)[:80]}, but it has to be {wanted}")


_JSON_NAMES = {str: "a string", int: "a whole number", float: "a number", tuple: "a list"}


def _parse_fields(kind: Any, content: dict[str, Any], prefix: str) -> Any:
    """An object of JSON as the dataclass `kind`. Fields with a default may be missing; unknown ones are ignored."""
    hints = get_type_hints(kind)
    values = {}
    for part in fields(kind):
        if part.name in content:
            values[part.name] = _parse(hints[part.name], content[part.name], prefix + part.name)
        elif part.default is MISSING and part.default_factory is MISSING:
            raise RunError(f"field {prefix}{part.name} is missing")
    return kind(**values)


def versions() -> dict[str, str]:
    """The versions of Python and of PACKAGES."""
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}


def hardware() -> Hardware:
    """The hardware of this machine, with its GPUs only if this process computes on them."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Asking for names makes a context on each GPU, which only a process that computes there should have.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(num_gpus))
    return Hardware(_cpu(), os.cpu_count() or 1, round(memory_bytes / 1e9, 1), gpus)


def _cpu() -> str:
    """The name of the processor, or the architecture where Linux does not tell a name."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name.*?:(.*)$", info.read_text() if info.is_file() else "", re.MULTILINE)
    return name[1].strip() if name else platform.machine()
