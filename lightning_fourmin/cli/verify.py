"""`fourmin verify`: checks shards, or makes the index of shards that have none."""

import sys

from lightning_fourmin.cli.hydra_app import run
from lightning_fourmin.data.pack.verify import VerifyOptions, verify
from lightning_fourmin.text import plural


def main() -> None:
    """Runs the verb."""
    run("verify", VerifyOptions, _verify)


def _verify(options: VerifyOptions) -> None:
    report = verify(options)
    for fault in report.faults:
        print(fault, file=sys.stderr)
    for name, split in report.index.splits.items():
        print(
            f"split {name}: {split.num_samples:,} samples in {plural(len(split.shards), 'shard')}, "
            f"{split.num_bytes / 1e6:,.1f} MB"
        )
        for what, number in report.num_lacking[name].items():
            if number:
                print(f"split {name}: {plural(number, 'sample')} without {what}")
    if report.faults:
        print(f"fourmin verify: {options.path} has {plural(len(report.faults), 'fault')}", file=sys.stderr)
        sys.exit(1)
    print("no faults" + (", index written" if options.index else ""))
