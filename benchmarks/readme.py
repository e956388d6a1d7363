"""Fills the table of README.md from the file of results.

Example: .venv/bin/python benchmarks/readme.py
"""

import re
from pathlib import Path

from results import read, table
from stats import paired_ratio

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PLACE = re.compile(r"(<!-- steps of [^>]*-->\n).*?(?=\n<!-- end -->)", re.DOTALL)
SETTINGS = {
    "2x2_200mbit": "2 x 2, 200 Mbit/s",
    "2x4_200mbit": "2 x 4, 200 Mbit/s",
    "4x2_200mbit": "4 x 2, 200 Mbit/s",
    "2x2_1gbit": "2 x 2, 1 Gbit/s",
    "4x2_1gbit": "4 x 2, 1 Gbit/s",
    "1x2_100gbit": "one machine, 2 ranks",
}


def steps() -> str:
    data: dict[str, dict[str, list[float]]] = read("step")
    rows = []
    for name, title in SETTINGS.items():
        times = data[f"{name}_fc_heavy"]
        pairs = (("ddp", "fourmin"), ("ddp", "fourmin_fp16"), ("ddp_fp16", "fourmin_fp16"))
        rows.append([title, *(f"{paired_ratio(times[theirs], times[ours]).median:.2f}" for theirs, ours in pairs)])
    return table(["nodes x ranks, link", "FP32 wire, x ddp", "FP16 wire, x ddp", "FP16 wire, x fp16_compress"], rows)


def filled(text: str) -> str:
    """The text of README with its table as the results have it."""
    return PLACE.sub(lambda found: found[1] + steps(), text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
