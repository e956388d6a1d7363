"""The sentences that `fourmin tune` ends with: whether it will help."""

from lightning_fourmin.allreduce.table import AllReduceTable, Row
from lightning_fourmin.tune.verdict import sentence_for, sentence_without_model


def table(**ms_a_kib: float) -> AllReduceTable:
    rows = tuple(Row(n, {name: ms * n / 1024 for name, ms in ms_a_kib.items()}) for n in (1024, 1 << 20))
    return AllReduceTable("nodes2x2_groups2x2", "gloo", "measured", rows)


def test_yes_where_less_is_exposed() -> None:
    assert sentence_for(405.2, 351.4, 300.0, "2 buckets, hierarchical") == (
        "Will it help you? Yes: 405 ms a step with ddp, 351 ms with fourmin, 1.15x; of 105 ms that communication adds "
        "to a step 51 ms are left (2 buckets, hierarchical)."
    )


def test_no_where_backward_hides_all() -> None:
    assert sentence_for(1000.0, 990.0, 1001.0, "1 buckets, ring") == (
        "Will it help you? Not in speed: 1000 ms a step with ddp, 990 ms with fourmin; communication is 0% of a step "
        "with ddp: there is little to gain."
    )


def test_no_where_nothing_is_faster() -> None:
    assert "communication is 40% of a step with ddp, and nothing that was tried is faster." in sentence_for(
        500.0, 490.0, 300.0, "1 buckets, ring"
    )


def test_without_a_model() -> None:
    assert "takes 102.4 ms as a ring and 51.2 ms as torus, 2.00x;" in sentence_without_model(
        table(ring=0.1, torus=0.05)
    )
    assert "takes 102.4 ms as a ring, and nothing else is faster;" in sentence_without_model(table(ring=0.1, torus=0.2))
