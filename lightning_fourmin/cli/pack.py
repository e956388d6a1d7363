"""`fourmin pack`: writes a folder of images as tar shards with an index."""

from lightning_fourmin.cli.hydra_app import run
from lightning_fourmin.data.pack.pack import PackOptions, pack
from lightning_fourmin.text import plural


def main() -> None:
    """Runs the verb."""
    run("pack", PackOptions, _pack)


def _pack(options: PackOptions) -> None:
    index = pack(options)
    split = index.splits[options.split]
    print(
        f"{options.out}: split {options.split} has {split.num_samples:,} images of {len(index.classes):,} classes in "
        f"{plural(len(split.shards), 'shard')}, {split.num_bytes / 1e6:,.1f} MB"
    )
