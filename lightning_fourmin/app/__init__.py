"""The `fourmin` command line."""

import argparse

from lightning_fourmin import __version__


def main() -> None:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(
        prog="fourmin",
        description="Fast large-batch data-parallel training for PyTorch Lightning. "
        "In code: import lightning_fourmin; Trainer(strategy='fourmin').",
    )
    parser.add_argument("--version", action="version", version=f"fourmin {__version__}")
    parser.parse_args()
    parser.print_help()
