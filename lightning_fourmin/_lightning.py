"""Private names of Lightning and torch that the package needs: the one file to read when either has a new release.

Each stands here under a name of our own, with the public way beside it where there is one. Only what subclasses use or
override of their base classes stands elsewhere (`FourMinStrategy._setup_model`, say). Tests in
`tests/project/test_private_names.py` hold that each name exists, does what is needed, and is touched nowhere else.
"""

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._pytree import tree_leaves as _tree_leaves

# Lightning: launching and process groups.

# There is no public launcher of scripts to build on.
SubprocessScriptLauncher = _SubprocessScriptLauncher
ChildProcessObserver = _ChildProcessObserver
set_num_threads_if_needed = _set_num_threads_if_needed
# `dist.init_process_group` is the public way; this one also leaves an NCCL group in good order at exit.
init_dist_connection = _init_dist_connection
# The public AsyncCheckpointIO is one of several that wrap another CheckpointIO.
WrappingCheckpointIO = _WrappingCheckpointIO

# Lightning: signals and checkpoints.

SIGTERM_HANDLER, REQUEUE_HANDLER = "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"
"""The methods of the signal connector that Lightning registers for SIGTERM, and for SLURM's warning of the end."""
ASK_BEFORE_BATCH = "_broadcast_sigterm_tensor"
"""The method of Lightning's training loop with which ranks ask each other for a SIGTERM before every batch."""


def set_handler(trainer: Trainer, name: str, handler: Callable[[int, FrameType | None], None] | None) -> None:
    """Makes Lightning register a handler in the place of its own `name`; None takes that back.

    `signal.signal` in a callback would be the public way, but Lightning registers its handlers after the setup of
    callbacks, restores what it has found at the end, and composes with what SLURM needs.
    """
    connector = vars(trainer._signal_connector)
    if handler is None:
        connector.pop(name, None)
    else:
        connector[name] = handler


def sigterm_exception(exit_code: int) -> SIGTERMException:
    """Lightning's exception for a run that was asked to end, with the exit code of the process.

    Lightning 2.6 takes the code as an argument, as any SystemExit does; from 2.7 on `__init__` takes none.
    """
    exception = SIGTERMException()
    exception.code = exit_code
    return exception


def hpc_checkpoint_path(trainer: Trainer) -> str:
    """Where Lightning looks for the checkpoint of a SLURM job that is queued again; there is no public way to ask."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


# torch: process groups.

# The public way is to make a store before the group and to hand it in; under srun or torchrun others make it.
get_default_store = _get_default_store


def buckets_of_ddp(
    tensors: list[Tensor], limits_bytes: list[int], are_sparse: list[bool], indices: list[int]
) -> list[list[int]]:
    """The places of the tensors in each bucket that DDP would make; its rule is public in words only."""
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits_bytes, are_sparse, indices)
    return [list(bucket) for bucket in buckets]


# torch: modules. Users derive their own layers from these bases, so tuples of the public classes would miss some.

BatchNormBase = _BatchNorm
NormBase = _NormBase
InstanceNormBase = _InstanceNorm


def parameters_by_name(layer: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary in which a layer looks its own parameters up, not those of its children."""
    return layer._parameters


def set_parameters_by_name(layer: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """Puts another dictionary in its place.

    `torch.func.functional_call` is the public way; it would change what `parameters()` lists as well.
    """
    layer.__dict__["_parameters"] = parameters


def count_as_step(optimizer: Optimizer) -> None:
    """Spares the warning that a schedule came before the optimizer, for a step that was skipped on purpose.

    The public way, a filter of warnings, would hold for the whole process.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


# torch: kernels over lists of tensors. torch's own optimizers are made of them; they have no public names.

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
fused_sgd_ = getattr(torch, "_fused_sgd_", None)
"""torch's fused SGD; None where it is gone."""

# torch: dispatch.

TorchDispatchMode = _TorchDispatchMode
tree_leaves = _tree_leaves


def aten_op(name: str) -> Any:
    """The default overload of an operator by name; None where this version of torch has none of that name."""
    packet = getattr(torch.ops.aten, name, None)
    return None if packet is None else packet.default


def values_of_sparse(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor as they are; the public `values()` refuses tensors that are not coalesced."""
    return tensor._values()
