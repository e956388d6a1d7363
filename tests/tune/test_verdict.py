"""The sentences that `fourmin tune` ends with: whether it will help."""

import math
import random
import re

import pytest

from lightning_fourmin.allreduce.table import AllReduceTable, Row
from lightning_fourmin.tune.verdict import LOOKS, Interval, Verdict, sentence_without_model


def table(**ms_a_kib: float) -> AllReduceTable:
    rows = tuple(Row(n, {name: ms * n / 1024 for name, ms in ms_a_kib.items()}) for n in (1024, 1 << 20))
    return AllReduceTable("nodes2x2_groups2x2", "gloo", "measured", rows)


def verdict(compute_ms: float, ddp_ms: float, ours_ms: float, spread: float = 0.01, n: int = 16) -> Verdict:
    """Rounds whose times scatter around these, each on its own."""
    noise = random.Random(0)
    times = [[ms * noise.lognormvariate(0, spread) for _ in range(n)] for ms in (compute_ms, ddp_ms, ours_ms)]
    return Verdict.of(*times, look=1)


def test_yes_where_less_is_exposed() -> None:
    found = verdict(300.0, 405.2, 351.4)
    assert found.is_clear
    assert re.fullmatch(
        r"Will it help you\? Yes: 1\.1[56]x, between 1\.1\dx and 1\.1\dx after 16 rounds; 40\d ms a step with ddp, "
        r"35\d ms with fourmin; of 10\d ms that communication adds to a step 5\d\.\d ms are left "
        r"\(2 buckets, torus\)\.",
        found.sentence("2 buckets, torus"),
    )


def test_no_where_backward_hides_all() -> None:
    found = verdict(1001.0, 1000.0, 999.0)
    assert found.is_clear
    assert found.sentence("1 bucket, ring").startswith("Will it help you? Not in speed: between 0.9")
    assert "communication is 0% of a step with ddp (1 bucket, ring)." in found.sentence("1 bucket, ring")


def test_cannot_tell_where_times_scatter() -> None:
    found = verdict(50.0, 100.0, 95.0, spread=0.3)
    assert not found.is_clear
    assert re.match(
        r"Will it help you\? Cannot tell: between 0\.\d\dx and 1\.\d\dx after 16 rounds; ", found.sentence("")
    )


def test_cannot_tell_after_a_few_rounds() -> None:
    found = verdict(50.0, 100.0, 60.0, n=3)
    assert not found.is_clear
    assert "Cannot tell: too few rounds, 3; " in found.sentence("")
    assert "inf" not in found.sentence("")


def test_a_gain_larger_than_the_communication_is_noise() -> None:
    found = verdict(100.0, 107.0, 72.0)
    assert found.is_noise
    assert not found.is_clear
    assert "so this is noise" in found.sentence("")
    assert not verdict(100.0, 150.0, 100.0).is_noise


@pytest.mark.parametrize("scatter", ["equal", "spikes"])
def test_verdicts_seldom_err(scatter: str) -> None:
    """Of many sessions without a gain, which end when the interval decides, at most one in twenty says yes."""
    noise = random.Random(1)

    def ms() -> float:
        return noise.lognormvariate(3, 0.1) * (3 if scatter == "spikes" and noise.random() < 0.2 else 1)

    wrong = 0
    for _ in range(400):
        times: list[list[float]] = [[], [], []]
        for look, num_rounds in enumerate(LOOKS[:6], start=1):
            for some in times:
                some += [ms() for _ in range(num_rounds - len(some))]
            found = Verdict.of(*times, look)
            if found.is_clear:
                wrong += found.speedup.low > 1.03
                break
    assert wrong <= 20


def test_interval_is_that_of_the_sign_test() -> None:
    ordered = [float(number) for number in range(20)]
    # Tables of the sign test: of 20 values the 6th from each end, with a confidence of 95.9 %.
    assert Interval.of(ordered, 0.05) == Interval(5.0, 9.5, 14.0)
    assert Interval.of(ordered[:6], 0.05) == Interval(0.0, 2.5, 5.0)
    assert Interval.of(ordered[:5], 0.05) == Interval(0.0, 2.0, math.inf)


def test_without_a_model() -> None:
    assert "takes 102.4 ms as a ring and 51.2 ms as torus, 2.00x;" in sentence_without_model(
        table(ring=0.1, torus=0.05)
    )
    assert "takes 102.4 ms as a ring, and nothing else is faster;" in sentence_without_model(table(ring=0.1, torus=0.2))
