"""Thousands of damaged shards and indexes: clean samples, counted skips or a ShardError, as in test_fuzz.py."""

import os
from collections.abc import Iterator

import pytest

from tests.support.figures import figure

os.environ.setdefault("FUZZ_CASES", "50000")

from tests.data.test_fuzz import folder, test_any_bytes_in_a_shard, test_any_index  # noqa: F401

NAMES = {"test_any_bytes_in_a_shard": "Damaged shards read", "test_any_index": "Damaged indexes read"}


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest) -> Iterator[None]:
    handle = request.function.hypothesis
    inner, num_cases = handle.inner_test, 0

    def count(*args: object, **kwargs: object) -> None:
        nonlocal num_cases
        num_cases += 1
        inner(*args, **kwargs)

    handle.inner_test = count
    yield
    handle.inner_test = inner
    figure(NAMES[request.function.__name__], num_cases, "cases")
