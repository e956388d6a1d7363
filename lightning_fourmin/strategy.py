"""The `fourmin` strategy: DistributedDataParallel with tensor fusion and hybrid all-reduce behind its hook.

The methods stand in the order in which Lightning calls them:

    the Trainer is made        __init__, precision_plugin, checkpoint_io, _configure_launcher      (one process)
    the run begins             setup_environment, which calls setup_distributed                    (each rank)
    a checkpoint is read       load_checkpoint, load_model_state_dict
    the module is wrapped      _setup_model, _register_ddp_hooks                                   (only in a fit)
    every step                 on_train_batch_start, training_step, backward, optimizer_step
    now and then               reduce, save_checkpoint, on_validation_start
    the run ends               on_train_end; on_exception if there was an error; teardown
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fourmin._lightning import BatchNormBase, SubprocessScriptLauncher
from lightning_fourmin.allreduce.buckets import (
    FusionPlan,
    refuse_complex_gradients,
    refuse_sparse_gradients,
    wire_bytes,
)
from lightning_fourmin.allreduce.engine import Engine, all_reduce_hook
from lightning_fourmin.allreduce.measure import Meter, Spans, Trace
from lightning_fourmin.allreduce.measure_table import choose_table
from lightning_fourmin.allreduce.plan import CommOptions, CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups, gather_objects
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.faults.checkpoint_io import default_to_atomic, explain_mismatch, refuse_foreign, share_failure
from lightning_fourmin.faults.launcher import PatientLauncher
from lightning_fourmin.faults.missing_ranks import MissingRanks
from lightning_fourmin.faults.restart_store import join_group_of_attempt, shares_agents_store
from lightning_fourmin.precision.plugin import FourMinPrecision

log = logging.getLogger(__name__)

UNUSED_PARAMETERS = "Expected to have finished reduction in the prior iteration"
"""What torch says when a step has not used all parameters."""
STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
"""The buffers of torch's batch norm layers."""


class FourMinStrategy(DDPStrategy):
    """Data-parallel training with fused gradients and an all-reduce chosen by size and topology.

    It is a `DDPStrategy`, and takes the place of one: `Trainer(strategy="fourmin")`. DDP's reducer cuts the gradients
    into buckets of the strategy's choice and hands them to its communication hook; behind the hook the engine
    all-reduces them in threads of its own. Only the main thread uses the strategy itself. It is pickled where ranks are
    spawned, so it holds process groups and threads only between `setup_environment` and `teardown`.

    Where all buffers are running statistics of batch norm, they are synced before they are read, not before every
    forward. A module that switches batch norm to evaluation inside a training step reads those of its own rank there,
    unless the strategy gets `forward_sync_buffers=True`, which is what `ddp` does.

    All ranks report what goes wrong: which rank is gone or has not arrived, why a checkpoint could not be saved. A
    checkpoint is complete or not there at all. Under torchrun the ranks of a restarted run meet in a store of their
    own.

    Args:
        algorithm: "hybrid" (the table chooses for each bucket), "ring", "hierarchical" or "torus".
        group_size: number of ranks in a group of the hierarchical and torus all-reduce; None: what the tuner found
            best (it is in the table), else the ranks of a node.
        fusion_mb: fusion threshold in MiB of gradients; None: what `fourmin tune model=...` found best and wrote into
            the table, else 2 to 32 MiB by the cost model.
        switch_mb: hybrid switch size in MiB on the wire: hierarchical at or below it, ring above; None: the table.
        table: path of a measured table (CSV); "auto": the cached table of this topology, else measure one now (5 s) and
            keep it; None: the cached table, else the cost model.
        wire_dtype: "fp32", "fp16" or "bf16"; None: what `FourMinPrecision` computes in, else the gradients' dtype.
        predivide: factor that gradients are divided by before the sum, the rest after; None: chosen so that sums stay
            in range (see `allreduce/predivide.py`).
        stall_warning_s: seconds; when a phase waits longer, every rank that waits says which ranks have not arrived
            (on CUDA that is left to the watchdog of NCCL).
        trace: record spans; every rank writes its last ones (at most 50,000) as `fourmin_trace.rankN.json` below the
            Trainer's `default_root_dir`, for Perfetto or chrome://tracing, and `fourmin report` merges them into one
            file. On CUDA a span says when the host launched something, not how long the device took.
        **kwargs: everything that `DDPStrategy` and `DistributedDataParallel` take; None stands for "not given".
    """

    # The Trainer is made: no rank, device or process group is known.

    def __init__(
        self,
        *,
        algorithm: str = "hybrid",
        group_size: int | None = None,
        fusion_mb: float | None = None,
        switch_mb: float | None = None,
        table: str | Path | None = None,
        wire_dtype: str | None = None,
        predivide: float | None = None,
        stall_warning_s: float = 30,
        trace: bool = False,
        **kwargs: Any,
    ) -> None:
        self._options = CommOptions(
            algorithm, group_size, fusion_mb, switch_mb, table, wire_dtype, predivide, stall_warning_s, trace
        )
        # LightningCLI passes None for every argument of DDP that it was not given.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        own_caps = {"bucket_cap_mb", "bucket_cap_mb_list"} & kwargs.keys()
        if own_caps and fusion_mb is not None:
            raise ValueError(f"fusion_mb and {own_caps.pop()} both set the size of buckets: give one of them")
        super().__init__(**kwargs)
        self._ddp_cuts = bool(own_caps)
        self._topology: Topology | None = None
        self._missing_ranks: MissingRanks | None = None
        self._groups: ProcessGroups | None = None
        self._engine: Engine | None = None
        self._spans = Spans(torch.device("cpu"))
        """The stream of spans; outside of a fit nobody listens to it, so nothing is recorded."""
        self._trace: Trace | None = None
        self._trace_folder = ""
        self._late_buffers: LateBufferSync | None = None
        self._checkpoint_path: str | Path | None = None
        self.plan: CommPlan | None = None
        """How the gradients of the current fit travel; None where a user's hook runs."""

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Puts `FourMinPrecision` in the place of Lightning's plugin for "16-true" and "bf16-true".

        Lightning's has no FP32 masters.
        """
        if type(precision_plugin) is HalfPrecision:
            precision_plugin = FourMinPrecision("fp16" if precision_plugin.precision == "16-true" else "bf16")
        self._precision_plugin = precision_plugin

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = default_to_atomic(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self.launcher, SubprocessScriptLauncher):
            assert self.cluster_environment is not None
            self._launcher = PatientLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    # What callbacks and reports ask for when the ranks have met.

    @property
    def topology(self) -> Topology:
        """Which rank is on which node; known when the ranks have met. A tuned table may use other groups."""
        assert self._topology is not None
        return self._topology

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype of gradients on the wire, known before a fit; None: their own."""
        return self._options.wire(self._compute_dtype)

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        precision = self.precision_plugin
        return precision.dtype if isinstance(precision, FourMinPrecision) else None

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """The buckets of the current fit; None where DDP cuts them (`bucket_cap_mb`) or a user's hook runs."""
        return None if self.plan is None else self.plan.fusion

    @property
    def table(self) -> AllReduceTable | None:
        """The table by which the current fit chooses algorithms; None where a user's hook runs."""
        return None if self.plan is None else self.plan.table

    def measure_communication(self) -> Meter | None:
        """Starts to measure what communication costs; None where a user's hook runs instead of the engine."""
        return None if self._engine is None else self._engine.measure()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # DDPStrategy multiplies devices by nodes, which is wrong where nodes have different numbers of ranks.
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # The run begins: called in each rank, in fits, evaluations and predictions.

    @override
    def setup_environment(self) -> None:
        if self.root_device.type not in ("cpu", "cuda"):
            raise RuntimeError(
                f"strategy='fourmin' runs on CPU and CUDA, not on {self.root_device.type}, which has no process group: "
                "use Trainer(accelerator='cpu', strategy='fourmin') or strategy='auto'"
            )
        super().setup_environment()
        # Before anything else, so that all ranks explain whatever fails from here on.
        if dist.get_world_size() > 1:
            self._missing_ranks = MissingRanks(self._options.stall_warning_s)
        if dist.get_world_size() != self.world_size:
            raise RuntimeError(
                f"the process group has {dist.get_world_size()} ranks but the launcher says {self.world_size}: it is "
                "of an earlier run; run each job of a sweep in a process of its own"
            )
        places = gather_objects((self.node_rank, self.num_processes))
        node_of = [node for node, _ in places]
        for node, asked_for in places:
            if node_of.count(node) != asked_for:
                raise RuntimeError(
                    f"node {node} runs {node_of.count(node)} ranks but its Trainer asks for {asked_for}: make devices "
                    "equal to the ranks that the launcher starts on a node (on SLURM `srun` with --ntasks-per-node)"
                )
        self._topology = Topology.build(node_of, self._options.group_size)

    @override
    def setup_distributed(self) -> None:
        if shares_agents_store() and not dist.is_initialized():
            assert self.cluster_environment is not None
            self.set_world_ranks()
            join_group_of_attempt(
                self.cluster_environment,
                self._get_process_group_backend(),
                self._timeout or default_pg_timeout,
                device_id=None if self.root_device.type == "cpu" else self.root_device,
            )
        # This makes the default group, unless there is one.
        super().setup_distributed()

    # A checkpoint is read: before the module is set up.

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        refuse_foreign(checkpoint, checkpoint_path)
        self._checkpoint_path = checkpoint_path
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with explain_mismatch(self._checkpoint_path):
            super().load_model_state_dict(checkpoint, strict)

    # The module is wrapped: in a fit, after it has been converted to its precision and moved to its device.

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        user_kwargs = self._ddp_kwargs
        kwargs = dict(user_kwargs)
        self._late_buffers = None
        if not {"forward_sync_buffers", "broadcast_buffers"} & kwargs.keys() and only_batch_norm_statistics(model):
            kwargs["forward_sync_buffers"] = False
            self._late_buffers = LateBufferSync(model)
        self.plan = None
        if self._ddp_comm_hook is None:
            refuse_sparse_gradients(model)
            self.plan = self._decide_plan(model)
            refuse_complex_gradients(model, self.plan.wire_dtype)
            if self.plan.fusion is not None:
                kwargs["bucket_cap_mb_list"] = list(self.plan.fusion.caps_mb)
        # These arguments of DDP are for this module; the next fit of the strategy begins with the user's again.
        self._ddp_kwargs = kwargs
        try:
            return super()._setup_model(model)
        finally:
            self._ddp_kwargs = user_kwargs

    def _decide_plan(self, model: nn.Module) -> CommPlan:
        """The plan of a fit; a collective call, because rank 0 reads the table for all, or all measure one."""
        options = self._options
        self._groups = ProcessGroups.shared(self._timeout)
        table = choose_table(
            options.table,
            self.topology,
            self._groups,
            self.root_device,
            wire_bytes(model, self.wire_dtype),
            self.wire_dtype,
            any_groups=options.group_size is None,
        )
        parameters = []
        if not self._ddp_cuts:
            ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
            parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in ignored]
        rebuilt = bool(self._ddp_kwargs.get("static_graph")) or not self._ddp_kwargs.get("find_unused_parameters")
        return CommPlan.decide(
            options, self.topology, dist.get_backend(), table, parameters, self._compute_dtype, rebuilt
        )

    @override
    def _register_ddp_hooks(self) -> None:
        # DDPStrategy registers hooks on CUDA only, and drops a user's hook on CPU without a warning.
        assert isinstance(self.model, DistributedDataParallel)
        if self._ddp_comm_hook is not None:
            rank_zero_info("fourmin: your ddp_comm_hook is used; fusion and hybrid all-reduce stay out of its way")
            wrapper = self._ddp_comm_wrapper
            hook = self._ddp_comm_hook if wrapper is None else wrapper(self._ddp_comm_hook)
            self.model.register_comm_hook(self._ddp_comm_state, hook)
            return
        assert self.plan is not None
        assert self._groups is not None
        assert self.lightning_module is not None
        self._spans = Spans(self.root_device)
        if self._options.trace:
            self._trace = Trace(self.global_rank, self.world_size)
            self._trace.align(self.root_device)
            # The folder of rank 0: a launcher's ranks may each have their own, with the time in its name.
            self._trace_folder = self.broadcast(self.lightning_module.trainer.default_root_dir)
            self._trace.write_at_exit(self._trace_folder)
            self._spans.listen(self._trace)
        self._engine = Engine(
            self.plan,
            self._groups,
            self.root_device,
            shared_bytes=wire_bytes(self.model, self.plan.wire_dtype),
            missing_ranks=self._missing_ranks,
            spans=self._spans,
        )
        self.model.register_comm_hook(self._engine, all_reduce_hook)
        rank_zero_info(f"fourmin: {self.plan.summary()}")
        log.debug("%s\n%s", self.plan.table, self.plan.explain())

    # Every step. Errors of the engine are raised here: DDP would garble one that it got from its hook.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._late_buffers is not None:
            self._late_buffers.before_training_step()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._spans.during("training_step"):
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._spans.during("backward"):
            loss = super().backward(*args, **kwargs)
        if self._engine is not None:
            self._engine.raise_error()
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if self._engine is not None:
            self._engine.raise_error()  # in manual optimization a user may call loss.backward(), not `backward`
        start = self._spans.now()

        def timed() -> Any:
            # The closure is forward and backward, so the optimizer's own work begins after it.
            nonlocal start
            loss = closure()
            start = self._spans.now()
            return loss

        result = super().optimizer_step(optimizer, timed, *args, **kwargs)
        self._spans.add("main", "optimizer", start)
        return result

    # Now and then, by all ranks together.

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduces as DDPStrategy does, but without the barrier before it: an all-reduce waits for all ranks by itself.

        The mean of integers is not rounded, since Lightning weights what is logged with the mean of batch sizes.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else ""
        mean = name in ("mean", "avg")
        op: Any = ReduceOp.SUM if mean else getattr(ReduceOp, name.upper()) if name else reduce_op
        with self._spans.waiting():
            dist.all_reduce(tensor, op=op, group=group)
        if not mean:
            return tensor
        result = tensor / dist.get_world_size(group)
        tensor.copy_(result)
        return tensor if tensor.is_floating_point() else result

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        with share_failure(self.broadcast):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._sync_late_buffers()

    # The run ends, well or with an error. `teardown` comes last in both cases, but a process may end without it.

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._sync_late_buffers()

    def _sync_late_buffers(self) -> None:
        if self._late_buffers is not None:
            self._late_buffers.sync()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Lightning explains torch's error with the names of its own strategies, unless the text is another one already.
        if any(isinstance(arg, str) and UNUSED_PARAMETERS in arg for arg in exception.args):
            exception.args = (
                "It looks like your LightningModule has parameters that were not used in producing the loss returned "
                "by training_step. If this is intentional, you must enable the detection of unused parameters in DDP, "
                "either by setting the string value `strategy='fourmin_find_unused_parameters_true'` or by setting the "
                "flag in the strategy with `strategy=FourMinStrategy(find_unused_parameters=True)`.",
            )
        super().on_exception(exception)
        if self._missing_ranks is not None and isinstance(exception, Exception):
            self._missing_ranks.explain(exception)

    @override
    def teardown(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.write(self._trace_folder)
        self._spans = Spans(torch.device("cpu"))
        self._groups = self._late_buffers = None
        if self._missing_ranks is not None:
            self._missing_ranks.close()
            self._missing_ranks = None
        super().teardown()

    # At the import of the package.

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            name = f"fourmin{suffix}"
            text = f"tensor fusion and hybrid all-reduce on DDP, `start_method` '{start_method}'"
            strategy_registry.register(name, cls, description=text, start_method=start_method)
            for unused in (True, False):
                strategy_registry.register(
                    f"{name}_find_unused_parameters_{str(unused).lower()}",
                    cls,
                    description=f"{text}, `find_unused_parameters` as {unused}",
                    find_unused_parameters=unused,
                    start_method=start_method,
                )


class LateBufferSync:
    """Broadcasts the running statistics of batch norm from rank 0 when they are about to be read.

    A training forward of batch norm does not read its running statistics, and DDP always broadcasts those of rank 0. So
    syncing them before evaluation and at the end gives every rank what DDP would give it, once instead of every step.
    A layer that is in evaluation mode in a training step reads its statistics there; then all are synced before each
    step, as DDP does it. The main thread of every rank calls it, outside of forward and backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers = [child for child in module.modules() if isinstance(child, BatchNormBase)]
        self._training = [layer.training for layer in self._layers]

    def before_training_step(self) -> None:
        """Syncs if layers have been switched between training and evaluation, and as long as one of them evaluates.

        Statistics that are read may still change: those of a teacher network follow the student's.
        """
        training = [layer.training for layer in self._layers]
        if training != self._training or not all(training):
            self._training = training
            self.sync()

    def sync(self) -> None:
        """Gives every rank the buffers of rank 0; a collective call."""
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


def only_batch_norm_statistics(module: nn.Module) -> bool:
    """Whether the module has buffers, and all of them are running statistics of torch's own batch norm layers."""
    owned = [(child, name) for child in module.modules() for name, _ in child.named_buffers(recurse=False)]
    return bool(owned) and all(_is_batch_norm(owner) and name in STATISTICS for owner, name in owned)


def _is_batch_norm(layer: nn.Module) -> bool:
    # A user's own forward may read the statistics in training as well.
    return isinstance(layer, BatchNormBase) and type(layer).forward in (BatchNormBase.forward, nn.SyncBatchNorm.forward)
