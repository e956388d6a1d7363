"""One line for each figure that a long test finds; `benchmarks/faults.py` makes a table of them."""


def figure(what: str, value: float, unit: str) -> None:
    """Seconds and the like are summed up by their median and the largest; `cases` are added."""
    print(f"FIGURE {what}: {value:.4g} {unit}")
