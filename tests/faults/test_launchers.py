"""Scripts that start their ranks themselves: every launcher trains the same, and Ctrl-C leaves no process behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = str(TESTS / "scripts" / "train.py")
TIMEOUT_S = 120.0


class Run:
    """A script, its ranks and whatever they start, found by a mark in their environment."""

    def __init__(self, arguments: list[str], directory: Path) -> None:
        self._mark = f"LAUNCHER_TEST={uuid.uuid4()}"
        self._output = directory / "output.txt"
        name, _, value = self._mark.partition("=")
        env = {key: text for key, text in os.environ.items() if key not in ("MASTER_PORT", "PL_GLOBAL_SEED")}
        paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        env |= {name: value, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
        env["OMP_NUM_THREADS"] = "1"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=directory,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own: a signal to the group reaches the ranks and not pytest.
                start_new_session=True,
                # A shell that runs the tests in the background has them ignore Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def processes(self, variable: str = "") -> list[int]:
        """Those that run, or those of them that were started with a variable; zombies have no environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                entries = path.read_bytes().split(b"\0")
                if self._mark.encode() in entries and any(entry.startswith(variable.encode()) for entry in entries):
                    found.append(int(path.parent.name))
        return found

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Waits while the script runs; the condition may come true as the last thing that it does."""
        deadline = time.monotonic() + TIMEOUT_S
        ended = False
        while not condition():
            assert not ended, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
            ended = self.process.poll() is not None

    def left(self) -> list[int]:
        """Those that still run a while after the script has ended: multiprocessing's helpers take a moment."""
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.processes()

    def kill(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(arguments: list[str], directory: Path) -> Iterator[Run]:
    run = Run(arguments, directory)
    try:
        yield run
    finally:
        run.kill()


def checksum(arguments: list[str], directory: Path, world: int) -> str:
    """The checksum that a run of the script prints once, all its ranks having trained and gone."""
    with running(arguments, directory) as run:
        code = run.process.wait(TIMEOUT_S)
        assert code == 0, run.output
        assert run.left() == []
        assert set(re.findall(r"rank (\d) of (\d) trains", run.output)) == {
            (str(rank), str(world)) for rank in range(world)
        }
        (found,) = re.findall(r"checksum (\w+)", run.output)
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def plain_ddp(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checksum([SCRIPT, "ddp", "2", "2"], tmp_path_factory.mktemp("ddp"), world=2)


@pytest.mark.parametrize("launcher", ["script", "torchrun"])
def test_launchers_train_the_same(plain_ddp: str, tmp_path: Path, launcher: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    arguments = {
        "script": [SCRIPT, "fourmin"],
        "torchrun": [*torchrun, "--master_port", str(free_port()), SCRIPT, "fourmin"],
    }[launcher]
    assert checksum([*arguments, "2", "2"], tmp_path, world=2) == plain_ddp


def test_one_rank(plain_ddp: str, tmp_path: Path) -> None:
    assert checksum([SCRIPT, "fourmin", "1", "2"], tmp_path, world=1) != plain_ddp


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    with running([SCRIPT, "fourmin", "2", "1000000"], tmp_path) as run:
        run.wait_until(lambda: run.output.count("trains") >= 2)
        assert len(run.processes()) == 2
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(60) == 1, run.output
        assert run.left() == []
        assert "Traceback" not in run.output


def test_a_launcher_leaves_no_variables_behind_and_is_known_in_later_calls(tmp_path: Path) -> None:
    with running([str(TESTS / "scripts" / "launch_twice.py")], tmp_path) as run:
        assert run.process.wait(TIMEOUT_S) == -signal.SIGKILL, run.output
        assert run.left() == []
        assert sorted(re.findall(r"rank (\d) has (.*)", run.output)) == [
            ("0", "[]"),
            ("1", "['FOURMIN_LAUNCHER_NOTE', 'FOURMIN_LAUNCHER_PID']"),
        ]


@pytest.mark.parametrize(("start_method", "last_rank"), [("popen", 0), ("spawn", 0), ("spawn", 1), ("fork", 0)])
def test_ranks_end_well_without_a_teardown(tmp_path: Path, start_method: str, last_rank: int) -> None:
    """A thread that came back from the store while its interpreter went down would abort the process."""
    with running([str(TESTS / "scripts" / "leave.py"), start_method, str(last_rank)], tmp_path) as run:
        assert run.process.wait(TIMEOUT_S) == 0, run.output
        assert run.left() == []
        assert run.output.count("has trained") == 2
        assert "terminate called" not in run.output
        if last_rank == 0:  # it hosts the store: nobody misses it
            assert "TCPStore" not in run.output
