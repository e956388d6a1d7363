"""The file of what `fourmin tune` found for a module, beside the table that it was found with."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from lightning_fourmin.allreduce.algorithms import ALGORITHMS
from lightning_fourmin.files import write_whole


@dataclass(frozen=True)
class Cuts:
    """What was found fastest for a module: bytes of each bucket in ready order, and an algorithm for all of them."""

    bucket_bytes: tuple[int, ...]
    algorithm: str | None = None
    """None: the table chooses for each bucket."""
    topology_key: str | None = None
    """Of the table that they were measured with."""


def cuts_path(table_path: Path, parameters: Sequence[tuple[str, nn.Parameter]]) -> Path:
    """Where the cuts for a module with such parameters are, beside the table that they were made with.

    Names do not matter: they change when a network becomes part of a LightningModule.
    """
    text = json.dumps([(list(parameter.shape), str(parameter.dtype)) for _, parameter in parameters])
    return table_path.with_suffix(f".{hashlib.sha256(text.encode()).hexdigest()[:12]}.json")


def write_cuts(path: Path, cuts: Cuts, made: str) -> None:
    write_whole(path, json.dumps({"made": made, **asdict(cuts)}, indent=1) + "\n")


def read_cuts(path: Path) -> Cuts | None:
    """None if there is no such file, or it may not be looked for."""
    if not os.path.exists(path):
        return None
    try:
        found = json.loads(path.read_text())
        cuts = Cuts(tuple(found["bucket_bytes"]), found.get("algorithm"), found.get("topology_key"))
        if not cuts.bucket_bytes or not all(isinstance(n, int) and n > 0 for n in cuts.bucket_bytes):
            raise ValueError("bucket_bytes must be a list of whole numbers above 0")
        if cuts.algorithm not in (None, *ALGORITHMS):
            raise ValueError(f"algorithm {cuts.algorithm!r} is not known")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not say where to cut buckets ({type(error).__name__}: {error}): delete it, or run "
            "`fourmin tune` with the model again"
        ) from error
    return cuts
