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
    """The text with U+FFFD for characters that HTML and XML cannot hold, and without the colours of a terminal."""
    return _CONTROL.sub("\ufffd", _TERMINAL_COLORS.sub("", text).replace("\r\n", "\n"))


def percent(share: float) -> str:
    """A share of 1 as a percentage with one decimal: `97.8 %` for 0.978, with a space that does not break."""
    return f"{100 * share:.1f}\u00a0%"


def whole(number: float) -> str:
    """A number without decimals: `2,346` for 2345.6."""
    return f"{number:,.0f}"


def rounded(number: float) -> str:
    """A number with three significant digits, and with an exponent where it is very small or very large."""
    if number and not 1e-4 <= abs(number) < 1e6:
        return f"{number:.2e}"
    return f"{number:,.{decimals(number, 3)}f}"


def decimals(number: float, num_digits: int) -> int:
    """How many decimals show `num_digits` significant digits of a number."""
    return max(0, num_digits - 1 - math.floor(math.log10(abs(number) or 1.0)))


def readable_size(num_bytes: float) -> str:
    """Bytes with four significant digits: `256 B`, `2 MiB`, `1.465 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: `float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks in rising order as text, with a range for neighbours: `ranks 1, 4-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if names.isdigit() else 's'} {names}"


def duration(seconds: float) -> str:
    """A time span in the unit that fits it: `61 s`, `45 min`, `2 h 5 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def moment(text: str) -> str:
    """A time in ISO 8601 as `2026-11-16 11:16 UTC`; any other text is returned as it is."""
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return text


def grouped(names: Sequence[str]) -> str:
    """Names as a list; a name that comes several times is there once, with their number: `2 x NVIDIA H100`."""
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in Counter(names).items())


def plural(number: int, noun: str) -> str:
    """A number with its noun: `1 epoch`, `8 epochs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
