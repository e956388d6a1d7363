"""`fourmin verify`: checks shards, or makes the index of shards that have none."""

import sys

from lightning_fourmin.cli.hydra_app import run
from lightning_fourmin.data.pack.verify import VerifyOptions, verify


def main() -> None:
    """Runs the verb."""
    run("verify", VerifyOptions, _verify)


def _verify(options: VerifyOptions) -> None:
    report = verify(options)
    for fault in report.faults:
        print(fault, file=sys.stderr)
    for name, split in report.index.splits.items():
        print(
            f"split {name}: {split.num_samples:,} samples in {len(split.shards)} shards, "
            f"{split.num_bytes / 1e6:,.1f} MB"
        )
    if report.faults:
        print(f"fourmin verify: {options.path} has {len(report.faults)} faults", file=sys.stderr)
        sys.exit(1)
    print("no faults" + (", index written" if options.index else ""))
