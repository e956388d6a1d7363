"""Private names of Lightning and torch that the package touches: the list is exact, so that none is added unseen.

They may change in any release. Their place is `_lightning.py`, with the public way next to each; what is used
elsewhere is listed here and moves there or goes.
"""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.support.source import FILES, tree

IMPORTED = {
    "_BatchNorm",
    "_ChildProcessObserver",
    "_FxValidator",
    "_InstanceNorm",
    "_NormBase",
    "_SubprocessScriptLauncher",
    "_WrappingCheckpointIO",
    "_distributed_is_initialized",
    "_get_default_store",
    "_init_dist_connection",
    "_is_local_file_protocol",
    "_register_ddp_comm_hook",
    "_set_num_threads_if_needed",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
}
"""Imported names, and public names from private modules."""
READ_OR_SET = {
    "_after_closure",
    "_amp_foreach_non_finite_check_and_unscale_",
    "_batches_that_stepped",
    "_call_children_scripts",
    "_checkpoint_connector",
    "_compute_bucket_assignment_by_size",
    "_current_fx_name",
    "_ddp_comm_hook",
    "_ddp_comm_state",
    "_ddp_comm_wrapper",
    "_default_root_dir",
    "_foreach_add",
    "_foreach_add_",
    "_foreach_mul_",
    "_foreach_norm",
    "_fused_sgd_",
    "_get_process_group_backend",
    "_loaded_checkpoint",
    "_logger_connector",
    "_native_multi_head_attention",
    "_opt_called",
    "_parameters",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_should_accumulate",
    "_strip_protocol",
    "_timeout",
    "_transformer_encoder_layer_fwd",
}
"""Attributes that the package does not make itself."""
INHERITED = {
    "FourMinPrecision._after_closure",
    "FourMinStrategy._ddp_comm_hook",
    "FourMinStrategy._ddp_comm_state",
    "FourMinStrategy._ddp_comm_wrapper",
    "FourMinStrategy._ddp_kwargs",
    "FourMinStrategy._precision_plugin",
    "FourMinStrategy._register_ddp_hooks",
    "FourMinStrategy._setup_model",
    "FourMinStrategy._timeout",
    "PatientLauncher._call_children_scripts",
    "ResilientDDPStrategy._checkpoint_io",
    "ResilientDDPStrategy._configure_launcher",
    "ResilientDDPStrategy._get_process_group_backend",
    "ResilientDDPStrategy._launcher",
    "ResilientDDPStrategy._timeout",
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
    assert set(found) == IMPORTED, dict(found)


def test_private_attributes_of_others() -> None:
    ours = made_here()
    found = defaultdict(set)
    for file, node in outside():
        # `os._exit` is Python's own, and documented.
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in {*ours, "_exit"}:
            found[node.attr].add(file)
    assert set(found) == READ_OR_SET, dict(found)


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
