"""Fills the tables of README.md from the files of results.

Example: .venv/bin/python benchmarks/readme.py
"""

import re
from pathlib import Path

from large_batch import MODELS, ROWS
from large_batch_runs import RUNS, read_rows
from results import read, table
from stats import paired_ratio

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PLACE = re.compile(r"(<!-- (\w+) of [^>]*-->\n).*?(?=\n<!-- end -->)", re.DOTALL)
SETTINGS = {
    "2x2_200mbit": "2 x 2, 200 Mbit/s",
    "2x4_200mbit": "2 x 4, 200 Mbit/s",
    "4x2_200mbit": "4 x 2, 200 Mbit/s",
    "2x2_1gbit": "2 x 2, 1 Gbit/s",
    "4x2_1gbit": "4 x 2, 1 Gbit/s",
    "1x2_100gbit": "one machine, 2 ranks",
}
POINTS = {
    "ms a step": "ms a step",
    "ms that communication adds": "of them added by communication",
    "e": "scaling efficiency",
}
"""Ending of a row of paper.md -> what README calls it."""


def steps() -> str:
    data: dict[str, dict[str, list[float]]] = read("step")
    rows = []
    for name, title in SETTINGS.items():
        times = data[f"{name}_fc_heavy"]
        pairs = (("ddp", "fourmin"), ("ddp", "fourmin_fp16"), ("ddp_fp16", "fourmin_fp16"))
        rows.append([title, *(f"{paired_ratio(times[theirs], times[ours]).median:.2f}" for theirs, ours in pairs)])
    return table(["nodes x ranks, link", "FP32 wire, x ddp", "FP16 wire, x ddp", "FP16 wire, x fp16_compress"], rows)


def paper() -> str:
    page = (ROOT / "benchmarks" / "paper.md").read_text()
    rows = []
    for ending, title in POINTS.items():
        (found,) = re.findall(rf"^\| ResNet-50, 1024 x 64, {ending} \| (.+) \| .+ \| (.+) \| prediction", page, re.M)
        rows.append([title, *found])
    return table(["ResNet-50, 1024 GPUs, 64 images each", "quoted", "ours"], rows)


def accuracy() -> str:
    rows = read_rows(RUNS)
    changes: list[str] = []
    place = 0
    for name in ROWS:
        change = name.partition("_")[2]
        if change not in changes:
            changes.insert(place, change)
        place = changes.index(change) + 1
    lines = []
    for change in changes:
        names = [f"{model}_{change}" for model in MODELS]
        line = [next(ROWS[name][0] for name in names if name in ROWS)]
        for name in names:
            # Where the paper's figures come from is told on the page of the results.
            line += [str(rows[name]), ROWS[name][1].partition(" [")[0]] if name in rows else ["-", "-"]
        lines.append(line)
    return table(["change", *(head for title in MODELS.values() for head in (title, "paper"))], lines)


def filled(text: str) -> str:
    """The text of README with its tables as the results have them."""
    makers = {"steps": steps, "accuracy": accuracy, "paper": paper}
    return PLACE.sub(lambda found: found[1] + makers[found[2]](), text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
