"""What every test shares: the warning filters and the pool of ranks."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from pool import RankPool
from ranks import WARNING_EXCEPTIONS


def pytest_configure(config: pytest.Config) -> None:
    for message, category in WARNING_EXCEPTIONS:
        line = f"ignore:{message}:{category.__module__}.{category.__qualname__}"
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks: `ranks.run(fn, *args, world=4, nodes=[2, 2])` gives the results in rank order."""
    with closing(RankPool()) as pool:
        yield pool
