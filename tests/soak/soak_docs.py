"""Every `fourmin` command of README, docs and examples, run one after the other on small data and for a short time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.project.test_docs import PAGES, SCRIPTS, commands
from tests.support.figures import figure
from tests.support.shards import jpeg, write_shard

SHORT = {
    "train": {
        "trainer": "cpu2",
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": "1",
        "trainer.limit_train_batches": "2",
        "trainer.limit_val_batches": "1",
        "global_batch": "null",
        "data.batch_size": "2",
        "data.num_workers": "1",
    },
    "tune": {"accelerator": "cpu", "budget_s": "1", "largest_mb": "1", "image_size": "32", "batch_size": "2"},
}
"""Values that take the place of a command's own: there are no GPUs here, and no ImageNet."""
NET = """
from torch import nn

def Net(width=8):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
"""


def documented() -> Iterator[tuple[str, ...]]:
    """Verbs with arguments, in the order of the pages, once each; without srun they run on this machine.

    What CHANGELOG.md names are parts of commands, and ones that are refused.
    """
    seen = set()
    for path in [*PAGES, *SCRIPTS]:
        if path.name == "CHANGELOG.md":
            continue
        for words in commands(path):
            verb, *arguments = words[words.index("fourmin") + 1 :] if "fourmin" in words else ("",)
            command = (verb, *arguments)
            # Not those with words for the reader to fill in, or of a host that there is not.
            to_fill_in = any(word.endswith(("=...", "DIR", "FILE")) or "//host/" in word for word in arguments)
            if "=" in "".join(arguments) and not to_fill_in and command not in seen:
                seen.add(command)
                yield command


def write_images(folder: Path, num_images: int) -> None:
    for number in range(num_images):
        path = folder / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(40, 36, seed=number))


def fourmin(folder: Path, *words: str) -> str:
    """Its error, if it has one."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_fourmin", *words],
        cwd=folder,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return f"{' '.join(words)}\n{done.stdout[-500:]}{done.stderr[-2000:]}" if done.returncode else ""


def test_documented_commands_run(tmp_path: Path) -> None:
    for name in ("imagenet/train", "imagenet/val", "cifar10/train", "cifar10/test"):
        write_images(tmp_path / name, 16)
    (tmp_path / "mynets.py").write_text(NET)
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "train-0.tar", [{"__key__": "0", "jpg": jpeg(20, 20), "cls": 0}])
    earlier = [
        ("pack", "src=cifar10/train", "out=shards/cifar10", "split=train", "shard_count=16"),
        ("pack", "src=cifar10/test", "out=shards/cifar10", "split=val", "shard_count=4"),
        ("train", "experiment=cifar10_resnet", "run_dir=runs/cifar10_resnet/2026-11-16_11-16-45"),
    ]
    errors = []
    for verb, *arguments in dict.fromkeys([*earlier, *documented()]):
        short = SHORT.get(verb, {})
        kept = [argument for argument in arguments if argument.partition("=")[0] not in short]
        errors.append(fourmin(tmp_path, verb, *kept, *(f"{key}={value}" for key, value in short.items())))
    figure("Commands of the documentation run", len(errors), "cases")
    assert len(errors) > 25
    assert "\n".join(filter(None, errors)) == ""
