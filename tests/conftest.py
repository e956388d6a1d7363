"""What every test shares: the warning filters and the pool of ranks."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest
from hydra.core.global_hydra import GlobalHydra

from lightning_fourmin.cli import main
from tests.support.pool import RankPool
from tests.support.ranks import WARNING_EXCEPTIONS, restore_loaders

# A busy machine may take its time.
hypothesis.settings.register_profile("fourmin", deadline=None)
hypothesis.settings.load_profile("fourmin")


def pytest_configure(config: pytest.Config) -> None:
    for message, category in WARNING_EXCEPTIONS:
        line = f"ignore:{message}:{category.__module__}.{category.__qualname__}"
        config.addinivalue_line("filterwarnings", line)


SLOW_FILES = (
    "test_train",
    "test_faults_restart",
    "test_launchers",
    "test_faults_stop",
    "test_datamodule",
    "test_examples",
    "test_teardown",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: at the end no process has a long one left while the other has none."""
    items.sort(key=lambda item: SLOW_FILES.index(item.path.stem) if item.path.stem in SLOW_FILES else len(SLOW_FILES))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tables that the user of this machine has measured stay out of the tests, and those of the tests out of theirs."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def loaders_as_torch_made_them() -> Iterator[None]:
    yield
    restore_loaders()


@pytest.fixture
def fourmin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in an empty folder; gives exit code, output and errors, those of its ranks included."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(*arguments: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["fourmin", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def ranks(own_cache: None) -> Iterator[RankPool]:
    """Real gloo ranks: `ranks.run(fn, *args, world=4, nodes=[2, 2])` gives the results in rank order."""
    with closing(RankPool()) as pool:
        yield pool
