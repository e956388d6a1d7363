"""`python -m lightning_fourmin` is `fourmin`: for launchers such as torchrun that start Python modules."""

from lightning_fourmin.cli import main

# Spawned ranks import this file under another name.
if __name__ == "__main__":
    main()
