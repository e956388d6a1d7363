"""DDPStrategy for runs that must not fail in silence: whole checkpoints, and errors that name the rank at fault."""

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.distributed.distributed_c10d import default_pg_timeout
from typing_extensions import override

from lightning_fourmin.errors import CheckpointError
from lightning_fourmin.faults.checkpoint_io import AtomicCheckpointIO, refuse_foreign
from lightning_fourmin.faults.launcher import PatientLauncher
from lightning_fourmin.faults.missing_ranks import MissingRanks
from lightning_fourmin.faults.restart_store import shares_agents_store, store_of_attempt


class ResilientDDPStrategy(DDPStrategy):
    """What `FourMinStrategy` adds to DDP for the day when something fails."""

    _missing_ranks: MissingRanks | None = None
    _stall_warning_s: float | None = None
    _checkpoint_path: Any = None

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Whole files or none, unless a plugin of the user's saves in another way."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """A save that fails ends all ranks with its reason: the others would wait for rank 0."""
        failure: Exception | None = None
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        except Exception as error:
            failure = error
        reason = self.broadcast(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if reason is not None:
            raise CheckpointError(reason)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        refuse_foreign(checkpoint, checkpoint_path)
        self._checkpoint_path = checkpoint_path
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        try:
            super().load_model_state_dict(checkpoint, strict)
        except RuntimeError as error:
            _, *details = f"{error}\n".splitlines()
            reason = shorten(" ".join(details) or str(error), 200, placeholder=" ...")
            raise CheckpointError(f"{self._checkpoint_path} was saved by another model: {reason}") from error

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            assert self.cluster_environment is not None
            self._launcher = PatientLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_distributed(self) -> None:
        if shares_agents_store() and not dist.is_initialized():
            self.set_world_ranks()
            environment = self.cluster_environment
            assert environment is not None
            store = store_of_attempt(
                environment.main_address,
                environment.main_port,
                self.global_rank,
                self.world_size,
                self._timeout or default_pg_timeout,
            )
            _init_dist_connection(
                environment,
                self._get_process_group_backend(),
                store=store,
                timeout=self._timeout,
                device_id=None if self.root_device.type == "cpu" else self.root_device,
            )
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._missing_ranks = MissingRanks(self._stall_warning_s) if self.world_size > 1 else None

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._missing_ranks is not None and isinstance(exception, Exception):
            self._missing_ranks.explain(exception)

    @override
    def teardown(self) -> None:
        if self._missing_ranks is not None:
            self._missing_ranks.close()
            self._missing_ranks = None
        super().teardown()
