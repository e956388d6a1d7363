"""One training step through the Trainer on emulated clusters: fourmin against ddp, ddp with the FP16 hook, and no wire.

Example: sudo .venv/bin/python benchmarks/step.py            # what is not in the results yet; all: half an hour
         sudo .venv/bin/python benchmarks/step.py --again --only 2x2_200mbit_fc_heavy
         sudo .venv/bin/python benchmarks/step.py --against HEAD~1     # alternated with an earlier commit
"""

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import ClusterUnavailable, EmulatedCluster
from models import NETS
from results import read, table, write
from stats import Estimate, estimate, paired_ratio

LOOPBACK = "100gbit"
"""Rate of the only node of a single machine: its ranks never use the link."""


@dataclass(frozen=True)
class Setting:
    """A cluster, a net, and what fourmin has to reach there: times faster than ddp (and than its FP16 hook)."""

    nodes: int
    ranks_per_node: int
    rate: str
    net: str
    fp16_over_ddp: float = 0.98
    fp16_over_hook: float | None = None
    fp32_over_ddp: float = 0.98
    latency_ms: float = 0.0
    """One way between two nodes, beside what the emulation takes by itself."""

    @property
    def name(self) -> str:
        latency = f"_{self.latency_ms:g}ms" if self.latency_ms else ""
        return f"{self.nodes}x{self.ranks_per_node}_{self.rate}{latency}_{self.net}"


SETTINGS = (
    Setting(2, 2, "200mbit", "fc_heavy", 2.3, 1.3, 1.35),
    Setting(2, 4, "200mbit", "fc_heavy", 2.3, 1.3, 1.35),
    Setting(4, 2, "200mbit", "fc_heavy", 1.7, 1.1),
    Setting(2, 2, "1gbit", "fc_heavy", 1.4, 1.0),
    Setting(2, 4, "1gbit", "fc_heavy", 1.4, 1.0),
    Setting(4, 2, "1gbit", "fc_heavy", 1.4, 1.0),
    Setting(1, 2, LOOPBACK, "fc_heavy"),
    Setting(2, 2, "200mbit", "deep_narrow"),
    Setting(2, 4, "200mbit", "deep_narrow"),
    Setting(4, 2, "200mbit", "deep_narrow"),
    Setting(2, 2, "1gbit", "deep_narrow"),
    Setting(2, 4, "1gbit", "deep_narrow"),
    Setting(4, 2, "1gbit", "deep_narrow"),
    Setting(1, 2, LOOPBACK, "deep_narrow"),
    Setting(2, 2, "200mbit", "fc_heavy", latency_ms=20),
    Setting(2, 2, "200mbit", "fc_heavy", latency_ms=50),
    Setting(2, 2, "200mbit", "deep_narrow", latency_ms=20),
    Setting(2, 2, "200mbit", "deep_narrow", latency_ms=50),
)


def wire_limit_ms(setting: Setting, bytes_a_parameter: int) -> float:
    """Time that a node's link needs for the bytes that must cross it: 2(q-1)/q of the gradients."""
    num_parameters = sum(p.numel() for p in NETS[setting.net][0]().parameters())
    bits_a_s = float(setting.rate.removesuffix("mbit").removesuffix("gbit")) * (1e6 if "mbit" in setting.rate else 1e9)
    q = setting.nodes
    return 1e3 * 2 * (q - 1) / q * num_parameters * bytes_a_parameter * 8 / bits_a_s


def measure(setting: Setting, rounds: int, arguments: Sequence[str] = ()) -> dict[str, list[float]]:
    """Median step of each variant in each round, in ms."""
    with EmulatedCluster(setting.nodes, setting.ranks_per_node, setting.rate, setting.latency_ms) as cluster:
        size = ["--nodes", str(setting.nodes), "--ranks-per-node", str(setting.ranks_per_node)]
        script = Path(__file__).with_name("step_rank.py")
        command = ["--net", setting.net, "--rounds", str(rounds), *size, *arguments]
        output = cluster.run(script, command, timeout_s=1800)
    return dict(json.loads(output.split("RESULT ")[1]))


def export(revision: str, folder: Path) -> None:
    """The package as it was at a commit, under the name `lightning_fourmin_before`: one process imports both."""
    archive = subprocess.run(["git", "archive", revision, "lightning_fourmin"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    (folder / "lightning_fourmin").rename(folder / "lightning_fourmin_before")
    for file in folder.rglob("*.py"):
        file.write_text(re.sub(r"\blightning_fourmin\b", "lightning_fourmin_before", file.read_text()))


def compare(settings: Sequence[Setting], revision: str, rounds: int) -> None:
    """Steps of this tree and of an earlier commit, alternated in the same processes; a ratio above 1 is an advance."""
    rows, data, slower = [], {}, []
    for i, setting in enumerate(settings):
        print(f"[{i + 1}/{len(settings)}] {setting.name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="fourmin-before-") as folder:
            export(revision, Path(folder))
            times = data[setting.name] = measure(setting, rounds, ["--before", folder])
        ratios = [paired_ratio(times[f"{name}_before"], times[name]) for name in ("fourmin", "fourmin_fp16")]
        slower += [setting.name for ratio in ratios if ratio.high < 1]
        medians = [f"{estimate(times[name]).median:.0f}" for name in times]
        rows.append([setting.name.replace(f"_{LOOPBACK}", ""), str(rounds), *medians, *map(str, ratios)])
        head = ("setting", "rounds", *(f"{name} ms" for name in times), "FP32: before / now", "FP16: before / now")
        told = f"Slower, with the whole interval below 1: {', '.join(slower) or 'none'}."
        write("step_against", f"python benchmarks/step.py --against {revision}", data, f"{table(head, rows)}\n\n{told}")


def judged(ratio: Estimate, goal: float) -> str:
    return f"{ratio} {'>=' if ratio.meets(goal) else 'MISSES'} {goal:g}"


def _share_of_wire(limit_ms: float, exposed_ms: float) -> str:
    if not limit_ms:
        return "-"
    return f"{limit_ms:.0f} ({limit_ms / exposed_ms:.0%})" if exposed_ms > 0 else f"{limit_ms:.0f} (all hidden)"


def row(setting: Setting, times: dict[str, list[float]]) -> list[str]:
    medians = {name: estimate(values).median for name, values in times.items()}
    fp16_over_ddp = paired_ratio(times["ddp"], times["fourmin_fp16"])
    fp16_over_hook = paired_ratio(times["ddp_fp16"], times["fourmin_fp16"])
    fp32_over_ddp = paired_ratio(times["ddp"], times["fourmin"])
    limits = [wire_limit_ms(setting, width) for width in (4, 2)]
    exposed = [medians[name] - medians["no_comm"] for name in ("fourmin", "fourmin_fp16")]
    shares = [_share_of_wire(limit, e) for limit, e in zip(limits, exposed, strict=True)]
    return [
        setting.name.replace(f"_{LOOPBACK}", ""),
        str(len(times["ddp"])),
        *(f"{medians[name]:.0f}" for name in ("no_comm", "ddp", "ddp_fp16", "fourmin", "fourmin_fp16")),
        judged(fp32_over_ddp, setting.fp32_over_ddp),
        judged(fp16_over_ddp, setting.fp16_over_ddp),
        str(fp16_over_hook) if setting.fp16_over_hook is None else judged(fp16_over_hook, setting.fp16_over_hook),
        *shares,
    ]


HEADER = (
    "setting",
    "rounds",
    "no comm. ms",
    "ddp ms",
    "ddp + fp16_compress ms",
    "fourmin ms",
    "fourmin FP16 wire ms",
    "FP32: x ddp",
    "FP16: x ddp",
    "FP16: x fp16_compress",
    "wire limit FP32 ms (share of exposed time)",
    "wire limit FP16 ms (share of exposed time)",
)


def save(command: str, data: dict[str, dict[str, list[float]]]) -> None:
    write("step", command, data, table(HEADER, [row(s, data[s.name]) for s in SETTINGS if s.name in data]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of settings", choices=[s.name for s in SETTINGS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="measure settings that are already in the results again")
    parser.add_argument("--against", metavar="REVISION", help="alternate with the package of an earlier commit instead")
    arguments = parser.parse_args()
    chosen = [s for s in SETTINGS if not arguments.only or s.name in arguments.only]
    if arguments.against:
        compare(chosen, arguments.against, arguments.rounds)
        return
    data: dict[str, dict[str, list[float]]] = read("step") or {}
    todo = [s for s in chosen if arguments.again or s.name not in data]
    command = f"python benchmarks/step.py --rounds {arguments.rounds}"
    for i, setting in enumerate(todo):
        print(f"[{i + 1}/{len(todo)}] {setting.name}", file=sys.stderr, flush=True)
        try:
            data[setting.name] = measure(setting, arguments.rounds)
        except ClusterUnavailable as error:
            sys.exit(f"no emulated cluster here: {error}")
        save(command, data)
    if not todo:
        save(command, data)


if __name__ == "__main__":
    main()
