"""Private names of Lightning and torch: touched in `_lightning.py` only, and each does there what is needed.

They may change in any release. What a subclass uses or overrides of its base classes is listed in `INHERITED`, exactly.
"""

import ast
import importlib
import inspect
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_fourmin import _lightning
from tests.support.pool import RankPool
from tests.support.source import FILES, tree
from tests.support.training import Regression, data, rank_trainer

INHERITED = {
    "FourMinPrecision._after_closure",
    "FourMinStrategy._checkpoint_io",
    "FourMinStrategy._configure_launcher",
    "FourMinStrategy._ddp_comm_hook",
    "FourMinStrategy._ddp_comm_state",
    "FourMinStrategy._ddp_comm_wrapper",
    "FourMinStrategy._ddp_kwargs",
    "FourMinStrategy._get_process_group_backend",
    "FourMinStrategy._launcher",
    "FourMinStrategy._precision_plugin",
    "FourMinStrategy._register_ddp_hooks",
    "FourMinStrategy._setup_model",
    "FourMinStrategy._timeout",
    "PatientLauncher._call_children_scripts",
    "_PatientObserver._terminate_all",
}
"""What our subclasses use or override of their base classes: the price of being one."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_foreign(module: str) -> bool:
    return module.partition(".")[0] in ("lightning", "torch")


def outside() -> Iterator[tuple[str, ast.AST]]:
    for file in FILES:
        if file != "_lightning.py":
            yield from ((file, node) for node in ast.walk(tree(file)))


def made_here() -> set[str]:
    """Names of functions, classes, variables and attributes of `self` that the package makes."""
    names = set()
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node):
                names.add(node.attr)
    return names


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def test_imported_private_names() -> None:
    found = defaultdict(set)
    for file, node in outside():
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and is_foreign(str(node.module)):
            modules = [str(node.module)]
            for alias in node.names:
                if is_private(alias.name):
                    found[alias.name].add(file)
        else:
            continue
        for module in modules:
            if is_foreign(module) and any(map(is_private, module.split("."))):
                found[module].add(file)
    assert not found, dict(found)


def test_private_attributes_of_others() -> None:
    ours = made_here()
    found = defaultdict(set)
    for file, node in outside():
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        # What others have made of `self` is listed in INHERITED; `os._exit` is Python's own, and documented.
        if not is_self(node) and node.attr not in {*ours, "_exit"}:
            found[node.attr].add(file)
    assert not found, dict(found)


def private_names_of(node: ast.ClassDef) -> set[str]:
    """The private names that a class defines or uses of itself."""
    named = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and is_self(one)}
    named |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    named |= {str(one.target.id) for one in node.body if isinstance(one, ast.AnnAssign)}
    return {name for name in named if is_private(name)}


def subclasses() -> Iterator[tuple[ast.ClassDef, str]]:
    """The classes of the package that have bases in Lightning or torch, and the source of these."""
    for path, node in ((file, node) for file in FILES for node in tree(file).body):
        if isinstance(node, ast.ClassDef) and node.bases and private_names_of(node):
            module = importlib.import_module("lightning_fourmin." + path.removesuffix(".py").replace("/", "."))
            mro = getattr(module, node.name).__mro__
            yield node, "\n".join(inspect.getsource(base) for base in mro if is_foreign(base.__module__))


def test_private_names_of_base_classes() -> None:
    found = {
        f"{node.name}.{name}"
        for node, source in subclasses()
        for name in private_names_of(node)
        if re.search(rf"\bself\.{name}\b|\bdef {name}\(", source)
    }
    assert found == INHERITED


# Each name does what it is needed for.


def test_every_name_of_the_file_is_tested() -> None:
    made = {
        name for name, value in vars(_lightning).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    public = {"Any", "Callable", "FrameType", "Optimizer", "SIGTERMException", "Tensor", "Trainer"}
    source = inspect.getsource(inspect.getmodule(test_every_name_of_the_file_is_tested))  # type: ignore[arg-type]
    assert {name for name in made - public if f"_lightning.{name}" not in source} == set()


def test_launcher_and_its_observer() -> None:
    launcher = _lightning.SubprocessScriptLauncher
    assert {"cluster_environment", "num_processes", "num_nodes"} <= set(inspect.signature(launcher).parameters)
    assert callable(launcher._call_children_scripts)
    assert callable(launcher.launch)
    observer = _lightning.ChildProcessObserver
    assert {"main_pid", "child_processes", "sleep_period"} <= set(inspect.signature(observer).parameters)
    assert callable(observer._terminate_all)
    assert set(inspect.signature(_lightning.set_num_threads_if_needed).parameters) == {"num_processes"}


def test_group_is_made_with_a_store() -> None:
    """`init_dist_connection` passes the store and the timeout on to torch."""
    parameters = inspect.signature(_lightning.init_dist_connection).parameters
    assert {"cluster_environment", "torch_distributed_backend", "kwargs"} <= set(parameters)


def test_wrappers_of_checkpoint_io_are_known() -> None:
    assert issubclass(AsyncCheckpointIO, _lightning.WrappingCheckpointIO)
    assert AsyncCheckpointIO().checkpoint_io is None


def test_handlers_take_the_place_of_lightnings() -> None:
    """Lightning looks both methods up on the object, and registers what it finds."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    for name in (_lightning.SIGTERM_HANDLER, _lightning.REQUEUE_HANDLER):
        assert callable(getattr(trainer._signal_connector, name))
        assert f"self.{name}" in inspect.getsource(type(trainer._signal_connector))
    before, received = signal.getsignal(signal.SIGTERM), []
    _lightning.set_handler(trainer, _lightning.SIGTERM_HANDLER, lambda number, frame: received.append(number))
    try:
        trainer._signal_connector.register_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
        trainer._signal_connector.teardown()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    _lightning.set_handler(trainer, _lightning.SIGTERM_HANDLER, None)
    assert _lightning.SIGTERM_HANDLER not in vars(trainer._signal_connector)


class CountedQuestions(Regression):
    """Counts how often the loop asks before a batch."""

    num_asked = 0

    def on_train_start(self) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        asked = getattr(loop, _lightning.ASK_BEFORE_BATCH)

        def ask() -> None:
            self.num_asked += 1
            asked()

        vars(loop)[_lightning.ASK_BEFORE_BATCH] = ask


def questions_of_a_fit() -> int:
    module = CountedQuestions(nn.Linear(4, 1))
    rank_trainer("ddp", max_steps=3).fit(module, data(4))
    return module.num_asked


def test_loop_asks_before_every_batch(ranks: RankPool) -> None:
    assert ranks.run(questions_of_a_fit, world=2) == [3, 3]


class NextSIGTERMException(SystemExit):
    """As Lightning has it after 2.6: the constructor takes no exit code."""

    def __init__(self) -> None:
        super().__init__()


@pytest.mark.parametrize("kind", [SIGTERMException, NextSIGTERMException])
def test_sigterm_exception_has_the_code(monkeypatch: pytest.MonkeyPatch, kind: type[SystemExit]) -> None:
    monkeypatch.setattr(_lightning, "SIGTERMException", kind)
    exception = _lightning.sigterm_exception(143)
    assert isinstance(exception, kind)
    assert exception.code == 143


def test_path_of_the_checkpoint_for_slurm(tmp_path: Any) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    assert _lightning.hpc_checkpoint_path(trainer) == str(tmp_path / "hpc_ckpt_1.ckpt")


def store_of_the_group() -> tuple[bytes, bool]:
    """What rank 0 has put into the store, and whether a clone of the store is another connection."""
    store = _lightning.get_default_store()
    if dist.get_rank() == 0:
        store.set("key", "value")
    clone = store.clone()  # type: ignore[attr-defined]
    return clone.get("key"), clone is not store


def test_store_of_the_group_can_be_cloned(ranks: RankPool) -> None:
    assert ranks.run(store_of_the_group, world=2) == [(b"value", True)] * 2


def test_buckets_close_when_they_reach_their_limit() -> None:
    tensors: list[Tensor] = [torch.zeros(size) for size in (10, 20, 30)]
    assert _lightning.buckets_of_ddp(tensors, [120, 1], [False] * 3, [0, 1, 2]) == [[0, 1], [2]]


def test_bases_of_norm_layers() -> None:
    assert issubclass(nn.BatchNorm2d, _lightning.BatchNormBase)
    assert issubclass(nn.SyncBatchNorm, _lightning.BatchNormBase)
    assert issubclass(nn.InstanceNorm1d, _lightning.InstanceNormBase)
    assert issubclass(_lightning.BatchNormBase, _lightning.NormBase)
    assert issubclass(_lightning.InstanceNormBase, _lightning.NormBase)


def test_layers_look_parameters_up_in_their_dictionary() -> None:
    layer, other = nn.Linear(2, 1), nn.Parameter(torch.full((1, 2), 7.0))
    before = _lightning.parameters_by_name(layer)
    assert set(before) == {"weight", "bias"}
    _lightning.set_parameters_by_name(layer, {**before, "weight": other})
    assert layer.weight is other
    _lightning.set_parameters_by_name(layer, before)
    assert layer.weight is before["weight"]


def test_a_skipped_step_counts() -> None:
    """torch warns where a schedule steps before its optimizer has; warnings are errors here."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    _lightning.count_as_step(optimizer)
    schedule.step()


def test_kernels_over_lists() -> None:
    first, second = [torch.tensor([1.0, 2.0])], [torch.tensor([10.0, 20.0])]
    assert _lightning.foreach_add(first, second, alpha=2)[0].tolist() == [21.0, 42.0]
    _lightning.foreach_add_(first, second, alpha=-1.0)
    assert first[0].tolist() == [-9.0, -18.0]
    _lightning.foreach_mul_(first, 2.0)
    assert first[0].tolist() == [-18.0, -36.0]
    assert _lightning.foreach_norm([torch.tensor([3.0, 4.0])], dtype=torch.float32)[0].item() == 5.0


def test_check_and_unscale_is_one_pass() -> None:
    flag, good = torch.zeros(()), torch.tensor([2.0, 4.0])
    _lightning.check_and_unscale_([good], flag, torch.tensor(0.5))
    assert (flag.item(), good.tolist()) == (0.0, [1.0, 2.0])
    _lightning.check_and_unscale_([torch.tensor([1.0, torch.inf])], flag, torch.tensor(0.5))
    assert flag.item() == 1.0


def test_fused_sgd_scales_by_its_dampening() -> None:
    """v = momentum * v + (1 - dampening) * g; w -= lr * v: what LARS is built on."""
    weight, gradient, buffer = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    assert _lightning.fused_sgd_ is not None
    _lightning.fused_sgd_(
        [weight],
        [gradient],
        [buffer],
        weight_decay=0.0,
        momentum=0.5,
        lr=1.0,
        dampening=0.75,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    assert (buffer.item(), weight.item()) == (2.0, -1.0)


class CountedOps(_lightning.TorchDispatchMode):
    """Counts the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_operators() -> None:
    with CountedOps() as counted:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert _lightning.aten_op("mm") in counted.seen
    assert _lightning.aten_op("gone") is None


def test_leaves_and_sparse_values() -> None:
    leaves = _lightning.tree_leaves({"a": [1, (2,)], "b": 3})
    assert leaves == [1, 2, 3]
    places, numbers = torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(places, numbers, (3,), check_invariants=True)
    assert _lightning.values_of_sparse(sparse).tolist() == [1.0, 2.0]
    with pytest.raises(RuntimeError, match="uncoalesced"):
        sparse.values()
