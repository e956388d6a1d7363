"""The exit code of a run that was asked to end, with the exceptions of Lightning 2.6 and of what comes after it."""

import os
import signal
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import exceptions

from lightning_fourmin import PreemptionCheckpoint, _lightning
from tests.support.half_training import Net, images, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")


class OfLightning26(exceptions.SIGTERMException):
    """Takes the exit code, as any SystemExit does."""

    def __init__(self, *args: object) -> None:
        SystemExit.__init__(self, *args)


class OfLightning27(exceptions.SIGTERMException):
    """Takes nothing and knows its exit code, as on Lightning's main branch."""

    def __init__(self) -> None:
        SystemExit.__init__(self, 128 + signal.SIGTERM)


class AsksToEnd(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("of_lightning", [OfLightning26, OfLightning27])
def test_a_run_that_is_asked_to_end_exits_with_143(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, of_lightning: type[SystemExit]
) -> None:
    monkeypatch.setattr(_lightning, "SIGTERMException", of_lightning)
    run = trainer(callbacks=[AsksToEnd(), PreemptionCheckpoint(tmp_path)])
    with pytest.raises(exceptions.SIGTERMException) as ended:
        run.fit(Net(), images(4))
    assert type(ended.value) is of_lightning
    assert ended.value.code == 143
    assert (tmp_path / "last.ckpt").is_file()
