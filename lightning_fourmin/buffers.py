"""Module buffers that need no broadcast before every forward: the running statistics of batch normalisation.

A training forward of batch norm does not read its running statistics, and rank 0 is the source of every broadcast, so
syncing them before evaluation and at the end gives every rank what rank 0 has, once instead of every step. Layers that
evaluate in a training step read theirs, so then they are synced before it, as DDP does.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def only_batch_norm_statistics(module: nn.Module) -> bool:
    """True if the module has buffers and all of them are running statistics of torch's own batch norm layers."""
    owned = [(child, name) for child in module.modules() for name, _ in child.named_buffers(recurse=False)]
    return bool(owned) and all(_is_batch_norm(owner) and name in STATISTICS for owner, name in owned)


def _is_batch_norm(layer: nn.Module) -> bool:
    # What a forward of another's making reads in training is not known.
    return isinstance(layer, _BatchNorm) and type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class LateBufferSync:
    """Broadcasts the statistics from rank 0 when they are about to be read."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers = [child for child in module.modules() if isinstance(child, _BatchNorm)]
        self._training = [layer.training for layer in self._layers]

    def before_training_step(self) -> None:
        """Syncs when layers have been switched between training and evaluation, and as long as one of them evaluates.

        That one reads its statistics, which may change: those of a teacher follow the student's.
        """
        training = [layer.training for layer in self._layers]
        if training != self._training or not all(training):
            self._training = training
            self.sync()

    def sync(self) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
        for name, buffer in self._module.named_buffers():
            if name not in ignored:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                dist.broadcast(flat, src=0)
                for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(values.view_as(buffer))
