"""The paper's claim in numbers: LARS in plain FP16 stalls, with FP32 masters it follows FP32."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fp16_lars_stall.py"
NUM_STEPS = 200

# The example feeds batches from a list: no workers, and nothing to shuffle.
pytestmark = pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fp16_lars_stall", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_naive_fp16_stalls_and_masters_do_not(example: ModuleType, tmp_path: Path) -> None:
    curves = {way: example.train(way, NUM_STEPS, show_progress=False) for way in example.WAYS}
    fp32, naive, fourmin = (curves[way] for way in ("FP32", "naive FP16", "FourMin FP16"))
    learned = fp32.losses[0] - fp32.losses[-1]
    assert learned > 0.5
    assert naive.losses[0] - naive.losses[-1] < learned / 3
    assert fourmin.losses[-1] == pytest.approx(fp32.losses[-1], rel=0.01)

    def mean_loss_of_updates(curve: object) -> float:
        return sum(curve.lost_updates) / NUM_STEPS  # type: ignore[attr-defined]

    assert mean_loss_of_updates(naive) > 0.8
    assert mean_loss_of_updates(fp32) < 0.1
    assert mean_loss_of_updates(fourmin) < 0.1
    example.draw(curves, tmp_path / "stall.png")
    assert (tmp_path / "stall.png").read_bytes().startswith(b"\x89PNG")
