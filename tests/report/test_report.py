"""The page of a run: real values, hostile names, missing files, old run folders, nothing from outside."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fourmin.errors import RunError
from lightning_fourmin.report.run_page import write_report
from lightning_fourmin.runs.folder import make_room, metrics_files
from lightning_fourmin.runs.metrics import read_metrics, resumed_steps, summary_so_far
from lightning_fourmin.runs.record import (
    BucketRecord,
    Hardware,
    ModelSize,
    RunRecord,
    Summary,
    TableRecord,
    TableRowRecord,
)
from tests.support.pages import Page
from tests.support.runs import RUN, write_run

RECORDED_RUNS = Path(__file__).parents[2] / "benchmarks" / "large_batch" / "runs"
HOSTILE = "</pre><script>alert(1)</script>\"'&lt;\x1b[31m${x}$y^{"
SHOWN = "</pre><script>alert(1)</script>\"'&lt;${x}$y^{"


def page_of(folder: Path, record: RunRecord = RUN) -> Page:
    record.write(folder)
    return Page(write_report(folder))


def test_a_bucket_without_an_expected_time_has_an_empty_cell(tmp_path: Path) -> None:
    """The table of the run did not have the algorithm that `switch_mb` took."""
    assert RUN.fusion_plan is not None
    known, *_ = RUN.fusion_plan
    page = page_of(tmp_path, replace(RUN, fusion_plan=(known, replace(known, expected_ms=None))))
    assert page.text.count("hierarchical in 2 pieces 12.5 ms rounded to fp16") == 1
    assert page.text.count("hierarchical in 2 pieces rounded to fp16") == 1


def test_a_run_with_everything(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = Page(write_report(tmp_path))
    assert page.all("h1")[0].text == "digits"
    assert page.figures == {
        "Top-1 accuracy": "97.8 %",
        "Images per second": "2,346",
        "S": "1,300",
        "N": "2",
        "e": "90.1 %",
        "Skipped steps": "3",
    }
    for text in (
        "done started 2026-11-16 11:16 UTC 61 s alexnet_bn_small 1 group of 2 ranks",
        "top-5 99.9 %, loss 0.0812, 8 epochs, 176 steps",
        "fourmin train optim.lr=2",
        "2 ranks x 32 images = global batch 64.",
        "alexnet_bn_small, 1,234,567 parameters in 26 tensors",
        "AMD EPYC 7B13, 2 cores, 15.6 GB; no GPU",
        "lightning 2.6.6, torch 2.13.0",
        "name: digits optim: lr: 2",
        "3 steps of 176 skipped, because a gradient was not finite",
        "Of a step of 27.3 ms, a rank waited 2.70 ms (9.9 %) for communication that computing did not hide.",
        "The rest, 90.1 %, is e; half of the steps had 88.0 % to 93.2 %.",
        "26 gradients, 4.71 MiB, in 2 buckets",
        "least in conv1.weight (0.002) and largest in fc6.weight (0.003)",
    ):
        assert text in page.text
    rows = [row.text for row in page.all("tr")]
    sent = "2 MiB dense hierarchical in 2 pieces 12.5 ms rounded to fp16"
    assert f"0 3 4 MiB float32 fc8.bias .. fc7.bias {sent}" in rows
    assert "256 B 0.321 0.123 hierarchical" in rows
    assert [cell.text for cell in page.all("td", "chosen")] == ["0.123", "0.456"]
    assert [figure.text.split("  ")[0] for figure in page.all("b")] == [
        "Validation accuracy",
        "Loss",
        "Learning rate",
        "Loss scale",
        "Images per second",
        "Efficiency e",
        "Milliseconds a step",
        "Milliseconds by size",
    ]


def test_needs_nothing_from_outside(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = Page(write_report(tmp_path))
    assert not {"script", "link", "iframe", "object", "base"} & {element.tag for element in page.elements}
    for element in page.elements:
        for name, value in element.attributes.items():
            if name in ("src", "href", "srcset", "data", "action"):
                assert value.startswith(("data:image/png;base64,", "#"))
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert set(re.findall(r"https?://[^\"' ]*", page.source)) == {"http://www.w3.org/2000/svg"}
    policy = next(e for e in page.all("meta") if "http-equiv" in e.attributes).attributes["content"]
    assert policy.startswith("default-src 'none'")


def test_pictures_are_xml_with_ids_of_their_own_and_the_colours_of_the_theme(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = Page(write_report(tmp_path))
    assert len(page.svgs) == 8
    ids = [element.attrib["id"] for svg in page.svgs for element in svg.iter() if "id" in element.attrib]
    assert ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:url\(|href=\")#([\w-]+)", page.source)) == set(ids)
    texts = [element.text for svg in page.svgs for element in svg.iter() if element.tag.endswith("}text")]
    assert {"step", "100 %", "2^16", "2.4k", "256 B"} <= set(texts)
    for svg in page.svgs:
        styles = " ".join(element.get("style", "") for element in svg.iter())
        assert "var(--series-1)" in styles
        assert not re.search(r"#[0-9a-f]{6}|font-family", styles)
        assert svg.get("role") == "img"
        assert svg.get("aria-label")


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    write_run(tmp_path)
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    record = replace(
        RUN,
        name=HOSTILE,
        command=HOSTILE,
        started=HOSTILE,
        status="failed",
        error=HOSTILE,
        versions={HOSTILE: HOSTILE},
        hardware=Hardware(HOSTILE, 1, 1.0, (HOSTILE,)),
        arithmetic=(HOSTILE,),
        model=ModelSize(HOSTILE, 1, 1),
        topology=HOSTILE,
        fusion_plan=(BucketRecord(1, 1, HOSTILE, HOSTILE, HOSTILE + "2"),),
        table=TableRecord(HOSTILE, HOSTILE, HOSTILE, (TableRowRecord(1, {HOSTILE: 1.0}, HOSTILE),)),
        overrides=(HOSTILE,),
    )
    write_run(tmp_path, record, layers=(HOSTILE, "fc.weight"))
    (tmp_path / "config.yaml").write_text(HOSTILE)
    page = Page(write_report(tmp_path))
    assert not page.all("script")
    assert page.all("h1")[0].text == page.all("title")[0].text.removesuffix(" - fourmin") == SHOWN
    assert page.all("pre")[0].text == SHOWN
    # Heading, started, model and topology (twice each), error, command, arithmetic, processor, GPU, version (twice),
    # override, config, layer (in its row and in the sentence), bucket (thrice), table (thrice), algorithm (in the head
    # of the table, as the choice, in the key of the chart).
    assert page.text.count(SHOWN) == 26
    assert len(page.svgs) == 8


FIRST_RUN = {
    "format": 1,
    "name": "digits",
    "command": "fourmin train",
    "started": "2026-11-16T09:02:11+00:00",
    "versions": {"torch": "2.13.0"},
    "hardware": {"cpu": "AMD EPYC", "cores": 2, "memory_gb": 25.3, "gpus": []},
    "seconds": 41,
    "status": "done",
    "error": None,
    "arithmetic": ["Global batch: 32 a rank x 2 ranks = 64."],
    "model": {"name": "alexnet_bn_small", "num_parameters": 647562, "num_tensors": 26},
    "topology": "2 ranks on 1 node",
    "world_size": 2,
    "fusion_plan": [{"num_tensors": 26, "num_bytes": 2590248, "dtype": "float32", "first": "b", "last": "a"}],
    "table": {
        "source": "cost model",
        "topology_key": "nodes1x2_groups1x2",
        "backend": "gloo",
        "rows": [{"num_bytes": 256, "milliseconds": {"ring": 0.3, "hierarchical": 0.1}, "choice": "hierarchical"}],
    },
    "summary": {"top1": 0.961, "top5": None, "epochs": 8, "steps": 176, "images_per_s": 900.0, "N": 2},
}
"""What the first version that kept a record wrote; files of that format stay readable."""


def test_the_first_record_format_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(FIRST_RUN))
    (tmp_path / "metrics.csv").write_text("epoch,lr,step,train/loss\n0,0.1,9,2.2\n0,0.2,19,1.9\n")
    page = Page(write_report(tmp_path))
    assert page.figures["Top-1 accuracy"] == "96.1 %"
    assert "256 B 0.300 0.100 hierarchical" in [row.text for row in page.all("tr")]
    assert "0 26 2.47 MiB float32 b .. a" in [row.text for row in page.all("tr")]
    assert len(page.svgs) == 3


@pytest.mark.parametrize("folder", sorted(RECORDED_RUNS.glob("*/seed1")), ids=lambda folder: folder.parent.name)
def test_recorded_runs_make_a_page(tmp_path: Path, folder: Path) -> None:
    """Runs that earlier versions of the package have left; they are not to be written to."""
    shutil.copytree(folder, tmp_path / "run")
    record, page = RunRecord.read(folder), Page(write_report(tmp_path / "run"))
    assert page.all("h1")[0].text == record.name
    assert record.summary.top1 is not None
    assert page.figures["Top-1 accuracy"] == f"{100 * record.summary.top1:.1f} %"
    assert page.svgs


def test_a_text_that_no_encoding_holds(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(RUN, name="\u5b9e\u9a8c", error="broken \udcff byte \x00"))
    assert page.all("h1")[0].text == "\u5b9e\u9a8c"
    assert "broken \ufffd byte \ufffd" in page.text
    assert page.source.isascii()


def test_a_failed_run_shows_its_error_first(tmp_path: Path) -> None:
    write_run(tmp_path, replace(RUN, status="failed", error="rank 1: ValueError: no\n  luck", summary=Summary()))
    page = Page(write_report(tmp_path))
    assert page.all("div", "error")[0].text == "This run failed rank 1: ValueError: no luck"
    assert page.source.index('class="error"') < page.source.index('class="figures"') < page.source.index("<section")
    # What was logged until then is shown all the same.
    assert page.figures["Top-1 accuracy"] == "98.0 %"
    assert page.figures["Images per second"] == "2,346"
    assert page.figures["Skipped steps"] == "1"


@pytest.mark.parametrize("text", [None, "", "step,epoch\n", "step,lr\n7,"])
def test_a_run_that_has_logged_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    hardware = Hardware("cpu", 1, 2.0, ("NVIDIA H100", "NVIDIA H100"))
    page = page_of(tmp_path, RunRecord("bare", "fourmin train", "today", {}, hardware))
    assert set(page.figures.values()) == {"not measured"}
    for text in (
        "running started today",
        "The run is still going, or it was ended without a chance to say so.",
        "The run has not written down its batch arithmetic.",
        "Ranks not known: the run did not get that far",
        "1 core, 2.00 GB; 2 x NVIDIA H100",
        "There is no config.yaml beside this page.",
        "Not logged: validation accuracy, loss, learning rate.",
    ):
        assert text in page.text
    assert [heading.text for heading in page.all("h2")] == ["What was run", "Learning"]
    assert not page.svgs


def test_a_run_too_short_to_log_shows_the_figures_of_its_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,val/top1\n0,3,0.5\n")
    page = page_of(tmp_path)
    precision, throughput = page.text.split(" Precision ")[1].split(" Throughput ")
    no_curve = "There is no curve: nothing was logged, as in a run of fewer steps than trainer.log_every_n_steps."
    assert precision == f"3 steps of 176 skipped, because a gradient was not finite. {no_curve}"
    assert throughput.startswith("Of a step of 27.3 ms, a rank waited 2.70 ms (9.9 %) for communication")
    assert no_curve in throughput


def test_a_single_row_is_a_dot(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,fourmin/T,fourmin/loss_scale,fourmin/skipped_steps,lr,step,train/loss,trust_ratio/a,val/top1\n"
        "0,10.0,65536.0,0.0,0.1,0,2.3,0.001,0.25\n"
    )
    page = page_of(tmp_path, replace(RUN, status="interrupted", summary=Summary(), world_size=1))
    assert page.figures["Top-1 accuracy"] == "25.0 %"
    assert "The run was interrupted." in page.text
    assert "No step was skipped" in page.text
    assert "One rank: there is nothing to communicate." in page.text
    assert len(page.svgs) == 6
    for svg in page.svgs[:5]:
        assert any(element.tag.endswith("}use") and "series-1" in element.get("style", "") for element in svg.iter())


def test_values_that_are_not_finite_are_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "step,train/loss,lr,trust_ratio/a\n0,2.5,nan,0.1\n17,nan,nan,inf\n1800,inf,nan,nan\n"
    )
    page = page_of(tmp_path, replace(RUN, summary=Summary()))
    assert "2 values of training, the first at step 17, cannot be drawn: not a finite number." in page.text
    assert "3 values of rate of group 0, the first at step 0, cannot be drawn" in page.text
    assert "2 values cannot be drawn: not a finite number." in page.text


def chart_texts(page: Page, title: str) -> list[str | None]:
    """The texts of one chart, with the labels of its ticks."""
    (svg,) = (svg for svg in page.svgs if (svg.get("aria-label") or "").startswith(title))
    return [element.text for element in svg.iter() if element.tag.endswith("}text")]


def test_charts_show_what_was_logged_on_linear_axes(tmp_path: Path) -> None:
    """A slow first step and a loss over three decades move the axis; no value is hidden or averaged."""
    lines = [f"{step},{400 if step == 0 else 20},{1000.0 * 0.1 ** (step / 100)}" for step in range(400)]
    (tmp_path / "metrics.csv").write_text("\n".join(["step,fourmin/step_ms,train/loss", *lines, ""]))
    page = page_of(tmp_path)
    assert {"0", "400"} <= set(chart_texts(page, "Milliseconds a step"))
    assert {"0", "200", "1k"} <= set(chart_texts(page, "Loss"))


def test_a_diverged_run_has_no_loss_of_an_earlier_epoch(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,val/loss,val/top1\n44,0.3,0.9\n88,nan,0.1\n")
    metrics = read_metrics(tmp_path)
    assert summary_so_far(replace(RUN, summary=Summary(top1=0.1)), metrics) == Summary(top1=0.1)
    (tmp_path / "metrics.csv").write_text("step,val/loss,val/top1\n44,nan,0.1\n88,0.3,0.9\n")
    assert summary_so_far(replace(RUN, summary=Summary()), read_metrics(tmp_path)) == Summary(top1=0.9, val_loss=0.3)


def test_the_last_line_may_be_half_written_and_steps_may_come_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,lr\n0,1\n10,2\n20,3\n10,4\n20,5\n30,1")
    series = read_metrics(tmp_path)["lr"]
    assert (series.steps.tolist(), series.values.tolist()) == ([0, 10, 20], [1, 4, 5])


def test_all_parts_of_a_resumed_run_are_one(tmp_path: Path) -> None:
    # Another run, then one that was resumed after step 20, twice, and last from an older checkpoint, after step 10.
    (tmp_path / "metrics-1.csv").write_text("step,lr\n0,9\n70,9\n")
    (tmp_path / "metrics-2.csv").write_text("step,lr,val/top1\n0,1,\n10,2,\n19,,0.5\n20,3,\n30,3,\n")
    (tmp_path / "metrics-9.csv").write_text("fourmin/resumed,step,lr\n1.0,20,\n,20,4\n,40,4\n")
    (tmp_path / "metrics-10.csv").write_text("step,fourmin/resumed,train/loss\n20,1.0,\n25,,0.7\n")
    page = page_of(tmp_path, replace(RUN, summary=Summary()))
    metrics = read_metrics(tmp_path)
    assert list(zip(metrics["lr"].steps, metrics["lr"].values, strict=True)) == [(0, 1), (10, 2), (20, 4)]
    assert metrics["train/loss"].steps.tolist() == [25]
    assert resumed_steps(metrics) == [20]
    assert "The run was resumed from a checkpoint after step 20: dotted lines." in page.text
    assert page.figures["Top-1 accuracy"] == "50.0 %"
    (tmp_path / "metrics.csv").write_text("step,fourmin/resumed,lr\n10,1.0,\n15,,8\n")
    metrics = read_metrics(tmp_path)
    assert list(zip(metrics["lr"].steps, metrics["lr"].values, strict=True)) == [(0, 1), (10, 2), (15, 8)]
    assert resumed_steps(metrics) == [10]
    assert "train/loss" not in metrics


def test_speed_is_that_of_the_last_part(tmp_path: Path) -> None:
    """The other part had other ranks."""
    (tmp_path / "metrics-1.csv").write_text("step,fourmin/N,fourmin/T\n0,2,100\n10,2,100\n")
    (tmp_path / "metrics.csv").write_text("step,fourmin/resumed,fourmin/N,fourmin/T\n20,1,,\n20,,4,180\n30,,4,180\n")
    page = page_of(tmp_path, replace(RUN, status="preempted", summary=Summary()))
    assert (page.figures["N"], page.figures["Images per second"]) == ("4", "180")
    assert "Command, start and speed are those since the last resume; the time is that of the whole run." in page.text


def test_a_scale_that_stays_is_not_said_to_fall(tmp_path: Path) -> None:
    for values, is_said in (((1, 1), False), ((65536, 32768), True)):
        lines = [f"{step},{value},{step}" for step, value in enumerate(values)]
        (tmp_path / "metrics.csv").write_text("\n".join(["step,fourmin/loss_scale,fourmin/skipped_steps", *lines, ""]))
        text = page_of(tmp_path, replace(RUN, summary=Summary())).text
        assert "1 step skipped, because a gradient was not finite." in text
        assert ("The loss scale fell." in text) == is_said


def test_curves_move_aside_and_along(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    make_room(first, None)
    assert list(first.iterdir()) == []
    for text in ("a", "b"):
        (first / "metrics.csv").write_text(text)
        make_room(first, first)
    (second / "metrics.csv").write_text("c")
    make_room(second, first)
    assert [file.name for file in metrics_files(first)] == ["metrics-1.csv", "metrics-2.csv"]
    assert [file.read_text() for file in metrics_files(second)] == ["a", "b"]
    assert (second / "earlier-1" / "metrics-1.csv").read_text() == "c"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_of_another_run_move_aside(tmp_path: Path) -> None:
    for name in ("checkpoints/last.ckpt", "hpc_ckpt_1.ckpt", "metrics.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    make_room(tmp_path, tmp_path)
    assert names(tmp_path) == ["checkpoints", "hpc_ckpt_1.ckpt", "metrics-1.csv"]
    make_room(tmp_path, None)
    assert names(tmp_path) == ["earlier-1"]
    assert names(tmp_path / "earlier-1") == ["checkpoints", "hpc_ckpt_1.ckpt", "metrics-1.csv"]
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    make_room(tmp_path, None)
    assert names(tmp_path) == ["earlier-1", "earlier-2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,lr\n1,2\n", "metrics.csv has no column step: Lightning's CSVLogger did not write it"),
        ("step,lr\n1,2\n2,fast\n", "metrics.csv, line 3: column lr holds no number (could not convert"),
        ("step,lr\n,2\n", "metrics.csv, line 2: column step holds no number"),
    ],
)
def test_damaged_metrics_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(RunError) as caught:
        read_metrics(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_a_long_run_makes_a_small_page_that_keeps_the_peaks(tmp_path: Path) -> None:
    layers = tuple(f"net.{number}.weight" for number in range(60))
    write_run(tmp_path, steps=5000, layers=layers)
    assert (tmp_path / "metrics.csv").read_text().count("\n") > 10_000
    page = Page(write_report(tmp_path))
    assert len(page.source) < 1_000_000
    assert [row.text for row in page.all("bdi")] == list(layers)
    series = read_metrics(tmp_path)["train/loss"]
    thin = series.thinned()
    assert len(thin.steps) <= 500
    assert (thin.values.min(), thin.values.max()) == (series.values.min(), series.values.max())
    assert (thin.steps[1:] > thin.steps[:-1]).all()
