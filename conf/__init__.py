"""The Hydra tree, a package so that `pkg://lightning_fourmin.conf` finds it."""
