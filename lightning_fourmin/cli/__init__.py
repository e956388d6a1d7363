"""The `fourmin` command line: `fourmin verb key=value ...`, each verb a Hydra app in a file of its own."""

import argparse
import importlib
import os
import sys
from importlib.util import find_spec

from lightning_fourmin import __version__

VERBS = {
    "train": "trains; with no argument a small net on digits, with 2 ranks and a report at the end",
    "pack": "image folder -> tar shards with an index",
    "verify": "checks every byte of tar shards, or makes the index of shards that have none",
    "tune": "measures all-reduce on this cluster, writes the table and says whether fourmin will help",
    "plan": "predicts step time, best fusion and algorithm, and scaling to thousands of ranks",
    "report": "the HTML page of a run, or of a sweep and its jobs",
}
"""What each verb does; the function `main` in the module of its name runs it."""
PACKAGES = ("hydra", "jinja2", "matplotlib", "omegaconf", "PIL", "rich", "simplejpeg", "torchmetrics", "webdataset")
"""The packages that the extra [app] brings, by the names that are imported."""
INTERRUPTED = 130
"""The exit code of a process that Ctrl-C has ended, by the convention of shells."""


def main() -> None:
    """Runs the verb that the command line names; the entry point of the console script."""
    if len(sys.argv) > 1 and (verb := sys.argv[1]) in VERBS:
        if missing := [name for name in PACKAGES if find_spec(name) is None]:
            sys.exit(
                f"fourmin {verb} needs the extra [app] (not installed: {', '.join(missing)}): "
                "pip install 'lightning-fourmin[app]'"
            )
        # Hydra reads the rest of the arguments and names the verb in its help.
        sys.argv[:2] = [f"{sys.argv[0]} {verb}"]
        try:
            importlib.import_module(f"{__name__}.{verb}").main()
            sys.stdout.flush()
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except BrokenPipeError:  # as in `fourmin plan | head`; Python would complain once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    lines = "\n".join(f"  {verb:8} {does}" for verb, does in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="fourmin",
        usage="fourmin [-h] [--version] verb [key=value ...]",
        description="Fast large-batch data-parallel training for PyTorch Lightning. "
        "In code: import lightning_fourmin; Trainer(strategy='fourmin').",
        epilog=f"verbs:\n{lines}\n\n`fourmin verb --help` lists the keys of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fourmin {__version__}")
    parser.add_argument("verb", nargs="?", choices=tuple(VERBS), metavar="verb", help=argparse.SUPPRESS)
    parser.parse_args()
    parser.print_help()
