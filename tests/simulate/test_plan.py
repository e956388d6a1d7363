"""`fourmin plan`: what it answers and writes, its clusters, and bad input."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_fourmin.allreduce.cost import DEFAULT_LINKS, Link, Links
from lightning_fourmin.allreduce.table import AllReduceTable, default_fusion_mb, write_table
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.cli.hydra_app import CONF
from lightning_fourmin.cli.plan import net_and_inputs
from lightning_fourmin.models import build_model
from lightning_fourmin.runs.record import BucketRecord
from lightning_fourmin.simulate.best_settings import FUSION_MB, best_settings, bottleneck
from lightning_fourmin.simulate.cluster import Cluster
from lightning_fourmin.simulate.predict import PlanOptions, predict
from lightning_fourmin.simulate.result import SimulationResult
from lightning_fourmin.simulate.roofline import peak_profile
from lightning_fourmin.simulate.scenario import Scenario, scaling_curve, techniques, training_time
from lightning_fourmin.simulate.stragglers import Stragglers

NETS_OF = "tests.simulate.test_plan"
"""The module that holds nets to plan for, as `module=` names it."""

Fourmin = Callable[..., tuple[int, str, str]]
SMALL = ["model=resnet_small", "input_shape=[3,32,32]", "samples_per_s=5000", "num_ranks=64", "most_ranks=64"]


def config(name: str = "p40_100gbe") -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(CONF / "cluster" / f"{name}.yaml"))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def predicted(options: PlanOptions) -> SimulationResult:
    return predict(options, *net_and_inputs(options))


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """A small ResNet on 256 GPUs: few bytes, many latencies."""
    with torch.device("meta"):
        module, images = build_model("resnet_small", 10), torch.empty(64, 3, 32, 32)
    cluster = Cluster.from_config(config())
    profile = peak_profile(module, images, cluster.device)
    profile = profile.scaled(64 / 10_000 / profile.compute_s)
    parameters = list(module.named_parameters())
    return Scenario(parameters, profile, cluster, 256, 0.1, wire_dtype=torch.float16)


# The answer.


def test_plan_from_the_command_line(fourmin: Fourmin, tmp_path: Path) -> None:
    code, output, errors = fourmin("plan", *SMALL, "out=here")
    assert code == 0, errors
    assert output.startswith("p40_100gbe: 64 ranks on 8 nodes, 8 x groups of 8; batch 64 a rank\n")
    assert "scaled to the given 5000 samples/s" in output
    written = json.loads((tmp_path / "here" / "plan.json").read_text())
    now = written["prediction"]
    assert now["N"] == 64
    assert now["S"] == pytest.approx(5000)
    assert now["T"] == pytest.approx(now["S"] * now["N"] * now["e"])
    assert now["step_ms"] == pytest.approx(now["compute_ms"] + now["exposed_ms"])
    assert list(written["curves"]) == ["all", "without fusion", "without FP16", "without hybrid", "none"]
    assert [point["N"] for point in written["curves"]["none"]] == [1, 2, 4, 8, 16, 32, 64]
    assert written["bottleneck"] in output
    assert written["fusion_mb"] == default_fusion_mb(Topology.build([rank // 8 for rank in range(64)]), "nccl")
    assert written["training"]["num_steps"] == round(90 * 1281167 / (64 * 64))
    events = json.loads((tmp_path / "here" / "trace.json").read_text())["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes[:2] == ["main", "reduce"]
    spans = [event for event in events if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e3 * now["step_ms"])
    picture = (tmp_path / "here" / "plan.svg").read_text()
    assert "<svg" in picture
    assert "Predicted waiting by ranks" in picture
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_the_plan_itself_is_printed_and_written(fourmin: Fourmin, tmp_path: Path) -> None:
    """A row a bucket: all of them in plan.json, the first and the last ones on the screen."""
    code, output, errors = fourmin("plan", *SMALL, "fusion_mb=0", "out=here")
    assert code == 0, errors
    rows = json.loads((tmp_path / "here" / "plan.json").read_text())["rows"]
    net = build_model("resnet_small", 1000)
    named = {name: parameter.numel() for name, parameter in net.named_parameters()}
    assert [(row["first"], row["last"], row["wire_bytes"]) for row in rows] == [
        (name, name, 2 * numel) for name, numel in reversed(named.items())
    ]
    for row in rows:
        assert row["expected_ms"] > 0
        assert (row["form"], row["update"], row["algorithm"]) == ("dense", "replicated", "hierarchical")
        assert (row["num_tensors"], row["num_pieces"], row["exactness"]) == (1, 1, "rounded to fp16")
    lines = output.splitlines()
    left_out = lines.index(f"... {len(rows) - 12} buckets left out")
    head, *first = lines[left_out - 7 : left_out]
    assert re.split(" {2,}", head.strip()) == [
        "what",
        "tensors",
        "on the wire",
        "form",
        "all-reduce",
        "expected",
        "exactness",
    ]
    last = lines[left_out + 1 : left_out + 7]
    assert lines[left_out - 8] == lines[left_out + 7] == ""
    numbered = list(enumerate(row["first"] for row in rows))
    for line, (number, what) in zip([*first, *last], [*numbered[:6], *numbered[-6:]], strict=True):
        assert line.split()[:2] == [str(number), what]
        assert line.endswith("rounded to fp16")


def test_rows_have_the_names_that_they_have_in_the_record_of_a_run(scenario: Scenario) -> None:
    rows = SimulationResult.of(scenario, scenario.profile, 1, 1, 1).as_dict()["rows"]
    assert len(rows) == len(scenario.plan.rows) > 1
    for row, planned in zip(rows, scenario.plan.rows, strict=True):
        recorded = asdict(BucketRecord.of(planned))
        assert {name: row[name] for name in recorded} == recorded


def test_few_buckets_are_all_printed(fourmin: Fourmin) -> None:
    code, output, errors = fourmin("plan", *SMALL, "wire_dtype=fp32", "out=null")
    assert code == 0, errors
    assert "left out" not in output
    (row,) = [line for line in output.splitlines() if "fc.bias .. stem.0.weight" in line]
    assert row.split()[:2] == ["0", "fc.bias"]
    assert row.endswith("equal up to the order of summation")


def test_the_guide_shows_what_is_printed(fourmin: Fourmin) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "plan.md").read_text()
    shown = [line for line in guide.splitlines() if re.match(r"\d  ", line)]
    code, output, errors = fourmin("plan", "most_ranks=1", "out=null")
    assert code == 0, errors
    assert [line for line in output.splitlines() if re.match(r"\d  ", line)] == shown != []


def test_help_lists_the_keys(fourmin: Fourmin) -> None:
    code, output, _ = fourmin("plan", "--help")
    assert code == 0
    assert output.startswith("fourmin plan is powered by Hydra.")
    for word in ("cluster: h100_ib, p40_100gbe, v100_ib", "num_ranks: 1024", "layer_times: scaled"):
        assert word in output


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "cluster").glob("*.yaml")))
def test_every_cluster_predicts_every_large_model(name: str) -> None:
    """Layer times are scaled so that the reference model has the throughput that the cluster's file says."""
    cluster = Cluster.from_config(config(name))
    assert cluster.name == name
    assert cluster.reference is not None
    options = PlanOptions(cluster=config(name), num_ranks=16, most_ranks=1, batch_size=cluster.reference.batch_size)
    result = predicted(replace(options, model=cluster.reference.model))
    found = asdict(result.prediction)
    assert found["S"] == pytest.approx(cluster.reference.samples_per_s)
    assert result.curves["all"][0].e == pytest.approx(1.0)
    if cluster.reference.fp32_samples_per_s is not None:
        assert asdict(result.curves["none"][0])["S"] == pytest.approx(cluster.reference.fp32_samples_per_s)
    alexnet = asdict(predicted(replace(options, model="alexnet_bn")).prediction)
    assert alexnet["S"] > 2 * found["S"]


def test_options_of_the_model_are_those_of_the_net(fourmin: Fourmin) -> None:
    """The net has 26 tensors, two of them of bn5, and takes images of the size that it is made for."""
    given = [one for one in SMALL if one.partition("=")[0] not in ("model", "input_shape")]
    for options, num_tensors in (["bn5=true"], 26), (["bn5=false", "image_size=64"], 24):
        model = ["model=alexnet_bn_small", *(f"model.model_options.{option}" for option in options)]
        code, output, errors = fourmin("plan", *given, *model, "fusion_mb=0", "out=null")
        assert code == 0, errors
        assert f"buckets: {num_tensors};" in output


class Tiny(nn.Sequential):
    """What `module=tests.simulate.test_plan:Tiny` makes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


class Drawn(Tiny):
    """A net whose constructor computes with its weights, which have no values on the meta device."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.first = self[0].weight[0, 0].item()


def not_a_module() -> str:
    return "no module"


def test_module_by_import_path_measured_here() -> None:
    options = PlanOptions(
        cluster=config(),
        module=f"{NETS_OF}:Drawn",
        module_options={"width": 16},
        input_shape=[4],
        layer_times="measured",
        batch_size=4,
        num_ranks=2,
        most_ranks=2,
    )
    result = predicted(options)
    assert "measured on cpu" in str(result)
    assert len(result.scenario.parameters) == 4
    assert result.prediction.compute_ms > 0


def test_tuned_table_gives_links_and_choices(fourmin: Fourmin, tmp_path: Path) -> None:
    """The links that a table was computed from are found again, and on the ranks of the table its choices hold."""
    links = Links(Link(2e-5, 1e-9), Link(5e-5, 1e-9), Link(3e-4, 8e-9), DEFAULT_LINKS["gloo"].reduce_s_per_byte)
    topology = Topology.build([rank // 4 for rank in range(16)])
    table = AllReduceTable.from_cost_model(topology, "gloo", links).only("torus")
    made = AllReduceTable.from_cost_model(topology, "gloo", links)
    (tmp_path / "tables").mkdir()
    write_table(made, tmp_path / "tables" / "all.csv")
    write_table(table, tmp_path / "tables" / "torus.csv")
    cluster, read = Cluster.from_config(config()).measured(tmp_path / "tables" / "all.csv")
    assert (cluster.ranks_per_node, cluster.backend, read.topology_key) == (4, "gloo", made.topology_key)
    # What the table does not show is the cluster's.
    assert cluster.links.inside_backend == Cluster.from_config(config()).links.inside_backend
    for name in ("inside", "between"):
        found, known = getattr(cluster.links, name), getattr(links, name)
        assert (found.latency_s, found.s_per_byte) == pytest.approx((known.latency_s, known.s_per_byte), rel=1e-3)
    # On its own 16 ranks the table chooses, on others the cost model with those links.
    arguments = [one for one in SMALL if not one.startswith("num_ranks")]
    for num_ranks, name, choice in ((16, "torus", "torus (cost model)"), (32, "all", "hierarchical up to")):
        given = [f"num_ranks={num_ranks}", f"table=tables/{name}.csv", "out=null"]
        code, output, errors = fourmin("plan", *arguments, *given)
        assert code == 0, errors
        assert f"{num_ranks} ranks on {num_ranks // 4} nodes" in output
        assert f"float16 wire, {choice}" in output


def test_table_of_one_node_leaves_the_network_to_the_cluster(tmp_path: Path) -> None:
    cluster = Cluster.from_config(config())
    table = AllReduceTable.from_cost_model(Topology.build([0] * 4), "gloo", DEFAULT_LINKS["gloo"])
    write_table(table, tmp_path / "table.csv")
    measured, _ = cluster.measured(tmp_path / "table.csv")
    assert measured.links.between == cluster.links.between
    assert measured.links.num_nics == cluster.links.num_nics
    assert measured.links.inside != cluster.links.inside


@pytest.mark.parametrize("found", [8, None])
def test_groups_of_the_table_are_those_of_the_plan(fourmin: Fourmin, tmp_path: Path, found: int | None) -> None:
    """It makes no difference whether the tuner found the groups or was given them."""
    topology = Topology.build([rank // 4 for rank in range(16)], group_size=8)
    table = AllReduceTable.from_cost_model(topology, "gloo", DEFAULT_LINKS["gloo"]).only("torus")
    write_table(replace(table, source="measured, n=5", group_size=found), tmp_path / "table.csv")
    given = [one for one in SMALL if not one.startswith("num_ranks")]
    code, output, errors = fourmin("plan", *given, "num_ranks=16", "table=table.csv", "out=null")
    assert code == 0, errors
    assert "float16 wire, torus (measured, n=5)" in output


def test_groups_of_a_table_that_are_larger_than_the_plan(fourmin: Fourmin, tmp_path: Path) -> None:
    topology = Topology.build([rank // 4 for rank in range(16)], group_size=8)
    table = AllReduceTable.from_cost_model(topology, "gloo", DEFAULT_LINKS["gloo"])
    write_table(replace(table, source="measured, n=5", group_size=8), tmp_path / "table.csv")
    given = [one for one in SMALL if not one.startswith("num_ranks")]
    code, _, errors = fourmin("plan", *given, "num_ranks=2", "table=table.csv", "out=null")
    assert code == 0, errors


# Scenarios.


def test_each_technique_helps_where_latency_binds(scenario: Scenario) -> None:
    variants = techniques(scenario, scenario.profile.scaled(1.3))
    total = {name: variant.prediction.T for name, variant in variants.items()}
    assert list(total) == ["all", "without fusion", "without FP16", "without hybrid", "none"]
    assert total["all"] > max(total[name] for name in total if name != "all")
    assert total["none"] < min(total[name] for name in total if name != "none")
    slower = variants["without FP16"].profile
    assert slower.samples_per_s == pytest.approx(scenario.profile.samples_per_s / 1.3)


def test_curve_begins_without_communication_and_falls(scenario: Scenario) -> None:
    curve = scaling_curve(scenario, 4096)
    assert [point.N for point in curve] == [2**power for power in range(13)]
    assert (curve[0].e, curve[0].comm_ms) == (pytest.approx(1.0), 0.0)
    assert curve[-1].e < 0.5 < curve[3].e
    with_groups = scaling_curve(replace(scenario, group_size=16, stragglers=Stragglers(0.1, num_backups=2)), 32)
    assert [point.N for point in with_groups] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("name", ["h100_ib", "p40_100gbe", "v100_ib"])
def test_adding_ranks_never_helps_efficiency_and_every_technique_helps(name: str) -> None:
    """Each curve falls, since nothing but the ranks changes; that with all techniques lies above the others."""
    cluster = Cluster.from_config(config(name))
    with torch.device("meta"):
        net = build_model("resnet50", 1000)
        profile = peak_profile(net, torch.empty(64, 3, 224, 224), cluster.device).scaled(4.0)
    parameters = list(net.named_parameters())
    scenario = Scenario(parameters, profile, cluster, 64, wire_dtype=torch.float16)
    curves = {name: scaling_curve(variant, 1024) for name, variant in techniques(scenario, profile.scaled(1.3)).items()}
    for curve in curves.values():
        for fewer, more in pairwise(curve):
            assert more.e <= fewer.e + 1e-9
    for points in zip(*curves.values(), strict=True):
        assert max(point.T for point in points) - 1e-6 <= points[0].T


def test_best_settings_are_at_least_as_fast_as_those_tried_one_by_one(scenario: Scenario) -> None:
    best = best_settings(scenario)
    for fusion_mb in FUSION_MB:
        for algorithm in ("ring", "hierarchical", "torus", "hybrid"):
            tried = replace(scenario, fusion_mb=fusion_mb, algorithm=algorithm)
            assert best.step_ms <= tried.prediction.step_ms + 1e-9
    assert list(best.by_algorithm) == [
        "hybrid",
        "ring",
        "hierarchical",
        "torus",
        "halving_doubling",
        "parameter_server",
    ]
    same = replace(
        scenario, algorithm=best.algorithm, fusion_mb=best.fusion_mb, chunk_bytes=int(best.chunk_mb * 1024 * 1024)
    )
    assert same.prediction.step_ms == pytest.approx(best.step_ms)


def test_bottleneck_names_what_to_take_away(scenario: Scenario) -> None:
    assert bottleneck(scenario).startswith("Bottleneck: latency between nodes; without, a step would take ")
    assert bottleneck(replace(scenario, num_ranks=1)).startswith("Bottleneck: compute; one rank does not communicate")
    patient = replace(scenario, profile=scenario.profile.scaled(1000))
    assert bottleneck(patient).startswith("Bottleneck: compute, ")
    slow = replace(patient, stragglers=Stragglers(probability=0.1, slowdown=3.0))
    assert bottleneck(slow).startswith("Bottleneck: slow ranks; without, a step would take ")


def test_training_time(scenario: Scenario) -> None:
    training = training_time(scenario, 90, 1_281_167)
    assert training.num_steps == round(90 * 1_281_167 / (64 * 256))
    assert training.hours == pytest.approx(training.num_steps * scenario.step.step_s / 3600)
    # Backups compute samples that nobody waits for: more steps for the same epochs.
    helped = replace(scenario, stragglers=Stragglers(0.1, num_backups=56))
    assert training_time(helped, 90, 1_281_167).num_steps == round(90 * 1_281_167 / (64 * 200))


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["~cluster.between"],
            "cluster 'p40_100gbe': between.latency_us is missing; conf/cluster/p40_100gbe.yaml shows",
        ),
        (["cluster.between.gb_per_s=0"], "cluster 'p40_100gbe': between.gb_per_s=0 must be above 0"),
        (["cluster.inside.latency_us=-1"], "cluster 'p40_100gbe': inside.latency_us=-1 must be 0 or more"),
        (["cluster.ranks_per_node=1.5"], "cluster 'p40_100gbe': ranks_per_node=1.5 must be a whole number"),
        (["cluster.device.tflops=fast"], "cluster 'p40_100gbe': device.tflops='fast' is not a number"),
        (["group_size=65"], "group_size=65 does not fit into num_ranks=64: choose 1 to 64, or leave it out"),
        (["num_ranks=0"], "num_ranks=0 must be at least 1"),
        (
            ["algorithm=butterfly"],
            "algorithm='butterfly' is not known: choose one of hybrid, ring, hierarchical, torus",
        ),
        (["algorithm=torus", "group_size=7"], "algorithm='torus' is not in the table of nodes8x8_groups9x7+1x1"),
        (
            ["algorithm=ring", "switch_mb=1"],
            "switch_mb=1 is the switch of algorithm=hybrid, but algorithm=ring: drop one",
        ),
        (["wire_dtype=int8"], "wire_dtype=int8 is not known: choose one of fp32, fp16, bf16"),
        (["layer_times=guessed"], "layer_times=guessed is not known: choose scaled or measured"),
        (
            ["samples_per_s=null", "cluster.reference=null"],
            "samples_per_s is not given and cluster 'p40_100gbe' has no",
        ),
        (
            ["cluster.reference=x"],
            "cluster 'p40_100gbe': reference.model is missing; conf/cluster/",
        ),
        (["input_shape=[3,-1,-1]"], "ResNet cannot be trained with an input of [3, -1, -1] (Trying to create tensor"),
        (["input_shape=[1,32,32]"], "ResNet cannot be traced with an input of (64, 1, 32, 32)"),
        (
            ["model=alexnet_bn", "input_shape=[3,224,224]"],
            "AlexNetBN cannot be traced with an input of (64, 3, 224, 224)",
        ),
        (
            ["input_shape=[1,32,32]", "layer_times=measured", "batch_size=2"],
            "ResNet cannot be trained with an input of [1, 32, 32]",
        ),
        (["samples_per_s=null", "cluster.reference.model=resnet51"], "cluster.reference.model: "),
        (
            [f"module={NETS_OF}:Drawn"],
            f"module={NETS_OF}:Drawn cannot be made with module_options (Tensor.item() cannot be",
        ),
        (["stragglers.jitter=0.1", "stragglers.num_backups=64"], "num_backups=64 leaves no rank of 64 to wait for"),
        (["stragglers.jitter=abc"], "stragglers.jitter: Value 'abc' of type 'str' could not be converted to Float\n"),
        (["+stragglers.size=3"], "stragglers.size: Key 'size' not in 'Stragglers'\n"),
        (["stragglers.num_backups=65"], "num_backups=65 leaves no rank of 64 to wait for"),
        (
            ["module=nowhere:Net"],
            "module=nowhere:Net cannot be imported (No module named 'nowhere'): write package.file",
        ),
        (
            [f"module={NETS_OF}:Gone", "input_shape=[4]"],
            f"module={NETS_OF}:Gone cannot be imported (module '{NETS_OF}' has",
        ),
        (
            [f"module={NETS_OF}:Tiny", "module_options={depth: 3}"],
            f"module={NETS_OF}:Tiny cannot be made with module_options (",
        ),
        (["fusion_mb=-1"], "fusion_mb=-1 must be 0 (every gradient alone) or more"),
        (
            [f"module={NETS_OF}:not_a_module"],
            f"module={NETS_OF}:not_a_module makes a str, not a torch.nn.Module",
        ),
        (
            [f"module={NETS_OF}:Tiny", "input_shape=null"],
            "input_shape is not given: module needs the shape of one sample",
        ),
        (["table=nowhere.csv"], "table=nowhere.csv cannot be read ([Errno 2] No such file or directory"),
        (["model=resnet51"], "model=resnet51 is not known: did you mean resnet50?"),
        (["model.model=resnet51"], "model='resnet51' is not known: did you mean 'resnet50'?"),
        (
            ["model.compile=true"],
            "model.compile is for training: of a model only its name and model.model_options",
        ),
        (
            ["+model.model_options.depth=3"],
            "model=resnet_small cannot be made with model.model_options (resnet_small() got an unexpected keyword",
        ),
        (["cluster=p41"], "cluster=p41 is not known"),
    ],
)
def test_errors_are_one_sentence(fourmin: Fourmin, tmp_path: Path, arguments: list[str], message: str) -> None:
    given = [one for one in SMALL if one.partition("=")[0] not in {other.partition("=")[0] for other in arguments}]
    code, output, errors = fourmin("plan", *given, *arguments)
    assert code == 1
    assert errors.startswith(f"fourmin plan: {message}")
    assert errors.count("\n") == 1
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())
