"""Numbers, sizes, times and names as messages and pages show them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_fourmin.text import (
    decimals,
    dtype_name,
    duration,
    grouped,
    moment,
    percent,
    plural,
    printable,
    rank_list,
    readable_size,
    rounded,
    whole,
)


@pytest.mark.parametrize(
    ("function", "given", "shown"),
    [
        (printable, "\x1b[31mred\x1b[0m\r\n\x00\t\udcff", "red\n\ufffd\t\ufffd"),
        (percent, 0.9778, "97.8\u00a0%"),
        (whole, 2345.6, "2,346"),
        (rounded, 0, "0.00"),
        (rounded, -0.0456789, "-0.0457"),
        (rounded, 99999.4, "99,999"),
        (rounded, 1e6, "1.00e+06"),
        (rounded, 0.00001234, "1.23e-05"),
        (readable_size, 0, "0 B"),
        (readable_size, 1023, "1023 B"),
        (readable_size, 1536 * 1024, "1.5 MiB"),
        (readable_size, 5 * 1024**4, "5120 GiB"),
        (dtype_name, torch.bfloat16, "bfloat16"),
        (rank_list, [3], "rank 3"),
        (rank_list, [0, 1], "ranks 0-1"),
        (rank_list, [1, 4, 5, 6, 9], "ranks 1, 4-6, 9"),
        (duration, 119.4, "119 s"),
        (duration, 120, "2 min"),
        (duration, 7500, "2 h 5 min"),
        (moment, "2026-11-16T11:16:45+00:00", "2026-11-16 11:16 UTC"),
        (moment, "yesterday", "yesterday"),
        (grouped, ["H100", "A100", "H100"], "2 x H100, A100"),
    ],
)
def test_shown(function: Callable[[Any], str], given: Any, shown: str) -> None:
    assert function(given) == shown


def test_numbers_with_a_word() -> None:
    assert [plural(1, "epoch"), plural(0, "epoch"), plural(1200, "step")] == ["1 epoch", "0 epochs", "1,200 steps"]
    assert [decimals(0.012, 1), decimals(250, 3), decimals(0, 3)] == [2, 0, 2]
