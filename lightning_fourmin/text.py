"""Numbers, sizes, ranks and texts as people read them: in messages, tables and pages."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

import torch

_TERMINAL_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Without the characters that HTML and XML cannot hold, such as the colours of a terminal."""
    return _CONTROL.sub("\ufffd", _TERMINAL_COLORS.sub("", text).replace("\r\n", "\n"))


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def whole(number: float) -> str:
    return f"{number:,.0f}"


def rounded(number: float) -> str:
    """Three digits that count, without an exponent where people would not write one."""
    if number and not 1e-4 <= abs(number) < 1e6:
        return f"{number:.2e}"
    return f"{number:,.{decimals(number, 3)}f}"


def decimals(number: float, num_digits: int) -> int:
    """How many places after the point show `num_digits` digits that count."""
    return max(0, num_digits - 1 - math.floor(math.log10(abs(number) or 1.0)))


def readable_size(num_bytes: float) -> str:
    """Bytes with four digits that count: `256 B`, `2 MiB`, `1.465 MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
    return f"{num_bytes / 1024:.4g} GiB"


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks with runs of neighbours drawn together: `ranks 1, 4-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if runs == [[runs[0][0]] * 2] else 's'} {names}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def moment(text: str) -> str:
    """An ISO 8601 time for people; anything else as it is."""
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return text


def grouped(names: Sequence[str]) -> str:
    """Equal names as one with their number."""
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in Counter(names).items())


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
