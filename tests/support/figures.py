"""The line that a long test prints for each figure it finds; `benchmarks/faults.py` makes a table of these lines."""


def figure(what: str, value: float, unit: str) -> None:
    """Prints a figure. The table adds those whose unit is `cases`, and shows median and largest of all others."""
    print(f"FIGURE {what}: {value:.4g} {unit}")
