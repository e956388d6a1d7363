"""A table of the figures that the long tests print.

Example: make soak         # runs them and then this script with soak.log
"""

import argparse
import re
import statistics
from pathlib import Path

from results import table, write

LINE = re.compile(r"^FIGURE (.+): (\S+) (\S+)$", re.MULTILINE)


def row(what: str, values: list[float], unit: str) -> list[str]:
    if unit == "cases":
        return [what, f"{sum(values):,.0f}", "", ""]
    return [what, str(len(values)), f"{statistics.median(values):.3g} {unit}", f"{max(values):.3g} {unit}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    text = parser.parse_args().log.read_text()
    found: dict[str, list[float]] = {}
    units = {what: unit for what, _, unit in LINE.findall(text)}
    for what, value, _ in LINE.findall(text):
        found.setdefault(what, []).append(float(value))
    rows = [row(what, values, units[what]) for what, values in found.items()]
    (outcome,) = re.findall(r"^=+ (.* in .*?s\b.*?) =+$", text, re.MULTILINE)[-1:]
    data = {what: {"unit": units[what], "values": values} for what, values in found.items()}
    header = ("what", "number", "median", "largest")
    write("faults", "make soak", data, f"Tests: {outcome}.\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
