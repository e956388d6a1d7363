"""The former place of the command line: `python -m lightning_fourmin.app` still runs `fourmin`."""

from lightning_fourmin.cli import main

# Spawned ranks import this file under another name.
if __name__ == "__main__":
    main()
