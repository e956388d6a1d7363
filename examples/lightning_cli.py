"""The parts of this package in LightningCLI: every option is a flag or a line of a YAML file.

python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --model.optimizer.init_args.lr=4
"""

from lightning.pytorch.cli import LightningCLI

import lightning_fourmin as fm

if __name__ == "__main__":
    LightningCLI(fm.ImageClassifier, fm.ShardDataModule, seed_everything_default=1)
