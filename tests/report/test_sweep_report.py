"""A sweep's tables and page: all jobs, also those that failed."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fourmin.errors import RunError
from lightning_fourmin.report.run_page import write_report
from lightning_fourmin.report.sweep_page import write_sweep
from lightning_fourmin.runs.record import RunRecord, Summary
from tests.support.pages import Page
from tests.support.runs import RUN, write_run


def job(number: int, **changes: object) -> RunRecord:
    overrides = (f"optim.lr={number}", "trainer.devices=2", "name=a|b")
    return replace(RUN, overrides=overrides, **changes)  # type: ignore[arg-type]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Job 0 done, job 1 failed, job 2 without a record, job 10 the best."""
    write_run(tmp_path / "0", job(0))
    write_report(tmp_path / "0")
    job(1, status="failed", error="ValueError: <b>lr</b>\n  is too | high", summary=Summary()).write(tmp_path / "1")
    (tmp_path / "2").mkdir()
    write_run(tmp_path / "10", job(10, summary=replace(RUN.summary, top1=0.991)))
    (tmp_path / ".hydra").mkdir()
    return tmp_path


def test_csv_has_everything_unrounded(sweep: Path) -> None:
    write_sweep(sweep)
    with (sweep / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["status"]) for row in rows] == [
        ("0", "done"),
        ("1", "failed"),
        ("2", "no record"),
        ("10", "done"),
    ]
    assert rows[0]["top1"] == "0.9778"
    assert (rows[3]["optim.lr"], rows[3]["trainer.devices"], rows[3]["seconds"]) == ("10", "2", "61.25")
    assert (rows[1]["top1"], rows[1]["error"]) == ("", "ValueError: <b>lr</b>\n  is too | high")
    assert "run.json does not exist" in rows[2]["error"]


def test_markdown_is_a_table_and_the_errors(sweep: Path) -> None:
    write_sweep(sweep)
    lines = (sweep / "sweep.md").read_text().splitlines()
    assert lines[2] == ("4 jobs: 2 done, 1 failed, 1 no record. Best top-1 accuracy: 99.1 % in job 10 (optim.lr=10).")
    assert lines[4] == "The same in all jobs: trainer.devices=2, name=a\\|b."
    table = [line for line in lines if line.startswith("|")]
    assert table[0].startswith("| job | status | optim.lr | top-1 | top-5 | val. loss |")
    assert table[2].startswith("| 0 | done | 0 | 97.8 % | 99.9 % | 0.0812 |")
    assert table[3].startswith("| 1 | failed | 1 |  |")
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "    ValueError: <b>lr</b>" in lines
    assert "      is too | high" in lines


def test_page_has_all_jobs_side_by_side(sweep: Path) -> None:
    page = Page(write_sweep(sweep))
    assert page.all("h1")[0].text == "Sweep of digits"
    assert "They differ in optim.lr. All have trainer.devices=2, name=a|b." in page.text
    rows = [row.text for row in page.all("tr")]
    assert rows[0].startswith("job status optim.lr top-1 top-5 val. loss")
    assert rows[1].startswith("0 done 0 97.8 % 99.9 % 0.0812")
    assert page.all("tr", "best")[0].text.startswith("10 done 10 99.1 %")
    assert [link.attributes["href"] for link in page.all("a")] == ["0/report.html"]
    errors = [box.text for box in page.all("div", "error")]
    assert errors[0] == "Job 1, failed ValueError: <b>lr</b> is too | high"
    assert errors[1].startswith("Job 2, no record")
    assert len(page.svgs) == 6
    keys = [key.text for key in page.all("span", "key")]
    assert keys[:2] == ["job 0", "job 10"]
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))


def test_hostile_settings_are_only_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>${x}$y^{\x00\x1b[31m"
    for number in (0, 1):
        write_run(tmp_path / str(number), replace(RUN, name=evil, overrides=(f"{evil}={evil}{number}", "~gone")))
    page = Page(write_sweep(tmp_path))
    assert not page.all("script")
    assert "<script>alert(1)</script>${x}$y^{\ufffd" in page.text
    assert "<script" not in (tmp_path / "sweep.md").read_text()


def test_more_jobs_than_colours(tmp_path: Path) -> None:
    for number in range(11):
        write_run(tmp_path / str(number), job(number, summary=replace(RUN.summary, top1=number / 20)), steps=10)
    page = Page(write_sweep(tmp_path))
    swatches = [element.attributes["style"] for element in page.all("i", "swatch")]
    assert swatches == ["--c: var(--faint)"] * 3 + [f"--c: var(--series-{number})" for number in range(1, 9)]
    assert "beyond eight jobs only the best eight have one" in page.text


def test_jobs_that_all_failed_at_once(tmp_path: Path) -> None:
    for number in (0, 1):
        job(number, status="failed", error="no data", summary=Summary(), seconds=0.5).write(tmp_path / str(number))
    page = Page(write_sweep(tmp_path))
    assert "2 jobs: 2 failed." in page.text
    assert "Curves" not in page.text


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    for folder in (tmp_path, tmp_path / "run", tmp_path / "nowhere"):
        with pytest.raises(RunError, match="is not the folder of a sweep: it has no numbered folder"):
            write_sweep(folder)


def test_ties_and_equal_curves_are_seen(tmp_path: Path) -> None:
    for number in range(3):
        record = replace(RUN, overrides=(f"optim.lr={number}",), summary=replace(RUN.summary, top1=0.9))
        write_run(tmp_path / str(number), record)
        (tmp_path / str(number) / "metrics.csv").write_text("step,train/loss\n0,2.5\n1,2.0\n")
    page = Page(write_sweep(tmp_path))
    assert "Best top-1 accuracy: 90.0 % in job 0 (optim.lr=0), the same in jobs 1, 2." in page.text
    assert "fourmin train optim.lr=2" in page.text
    assert [key.attributes["class"] for key in page.all("span", "key")] == ["key line", "key dashes", "key dashes"]
