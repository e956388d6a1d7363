"""What users type: names of the strategy, arguments, environments and files, and what each mistake is told."""

import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.table import AllReduceTable, write_table
from lightning_fourmin.allreduce.topology import Topology
from tests.support.pool import RankPool
from tests.support.ranks import PoolEnvironment
from tests.support.training import Regression, data, rank_trainer

# Names.


def test_every_alias_of_ddp_has_its_twin() -> None:
    ddp = {name: entry for name, entry in StrategyRegistry.items() if entry["strategy"] is DDPStrategy}
    own = {name: entry for name, entry in StrategyRegistry.items() if entry["strategy"] is FourMinStrategy}
    assert len(ddp) == 12
    assert own.keys() == {name.replace("ddp", "fourmin", 1) for name in ddp}
    for name, entry in ddp.items():
        assert own[name.replace("ddp", "fourmin", 1)]["init_params"] == entry["init_params"]
    assert own["fourmin"]["init_params"] == {"start_method": "popen"}
    assert own["fourmin_notebook_find_unused_parameters_true"]["init_params"] == {
        "start_method": "fork",
        "find_unused_parameters": True,
    }


@pytest.mark.parametrize(
    "suffix",
    ["", "_find_unused_parameters_true", "_spawn", "_spawn_find_unused_parameters_false", "_fork", "_notebook"],
)
def test_trainer_takes_the_name(suffix: str) -> None:
    name = f"fourmin{suffix}"
    trainer = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is FourMinStrategy
    assert f"'{StrategyRegistry[name]['init_params']['start_method']}'" in StrategyRegistry[name]["description"]


# Arguments.


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"algorithm": "butterfly"},
            r"algorithm='butterfly' is not known: .*'hybrid', 'ring', 'hierarchical', 'torus'",
        ),
        ({"algorithm": None}, "algorithm=None is not known: choose one of 'hybrid'"),
        ({"wire_dtype": "fp8"}, r"wire_dtype='fp8' is not known: .*None, 'fp32', 'fp16', 'bf16'"),
        ({"wire_dtype": torch.float16}, r"wire_dtype=torch.float16 is not known: choose one of"),
        ({"group_size": 0}, "group_size must be .* above 0, got 0: leave it out"),
        ({"group_size": -1}, "group_size must be .* above 0, got -1: leave it out"),
        ({"group_size": 1.5}, "group_size must be a whole number of ranks, got 1.5"),
        ({"group_size": "2"}, "group_size must be a number above 0, got '2'"),
        ({"fusion_mb": 0}, "fusion_mb must be a number above 0, got 0: leave it out"),
        ({"fusion_mb": -1}, "fusion_mb must be a number above 0, got -1"),
        ({"fusion_mb": float("nan")}, "fusion_mb must be a number above 0, got nan"),
        ({"fusion_mb": float("inf")}, "fusion_mb must be a number above 0, got inf"),
        ({"fusion_mb": "2"}, "fusion_mb must be a number above 0, got '2'"),
        ({"switch_mb": 0}, "switch_mb must be a number above 0, got 0"),
        ({"switch_mb": float("inf")}, "switch_mb must be a number above 0, got inf"),
        ({"predivide": 0}, "predivide must be a number above 0, got 0"),
        ({"predivide": -2.0}, "predivide must be a number above 0, got -2.0"),
        ({"switch_mb": 1, "algorithm": "ring"}, "switch_mb .* algorithm is 'ring': drop one"),
        ({"fusion_mb": 1, "bucket_cap_mb": 2}, "fusion_mb and bucket_cap_mb both .*: give one of them"),
        ({"fusion_mb": 1, "bucket_cap_mb_list": [2]}, "fusion_mb and bucket_cap_mb_list both .*: give one of them"),
    ],
    ids=str,
)
def test_bad_argument_is_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        FourMinStrategy(**kwargs)


def test_good_arguments_at_the_edge() -> None:
    FourMinStrategy(algorithm="torus", group_size=1, fusion_mb=1e-6, wire_dtype="bf16", predivide=0.5)
    FourMinStrategy(switch_mb=0.001, bucket_cap_mb=1)


def test_strategy_pickles_with_its_arguments() -> None:
    """Spawn sends it to the ranks."""
    original = FourMinStrategy(
        group_size=2, fusion_mb=3, switch_mb=1, table=Path("t.csv"), wire_dtype="fp16", predivide=4, static_graph=True
    )
    sent = vars(pickle.loads(pickle.dumps(original)))
    del sent["_forward_redirection"]  # has no notion of equality
    assert sent["_options"].fusion_mb == 3
    assert sent == {name: value for name, value in vars(original).items() if name in sent}


# Devices and launchers.


def test_device_without_process_groups_is_refused() -> None:
    strategy = FourMinStrategy(parallel_devices=[torch.device("mps")], cluster_environment=LightningEnvironment())
    with pytest.raises(RuntimeError, match=r"runs on CPU and CUDA, not on mps.*accelerator='cpu'.*strategy='auto'"):
        strategy.setup_environment()


MULTIRUN_APP = """
import hydra
import lightning_fourmin
from lightning.pytorch import Trainer

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    def trainer(strategy, devices):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        return Trainer(accelerator="cpu", strategy=strategy, devices=devices, **quiet)

    trainer("fourmin", 1)
    trainer("fourmin_spawn", 2)
    print("job", config.x, "may have one rank, or spawn")
    trainer("fourmin", 2)

main()
"""


def test_hydra_multirun_cannot_run_the_command_again(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(MULTIRUN_APP)
    done = subprocess.run(
        [sys.executable, str(app), "-m", "+x=1,2"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "job 1 may have one rank, or spawn" in done.stdout
    assert "Hydra multirun cannot start ranks by running the command again" in done.stderr
    assert "Use strategy='fourmin_spawn'" in done.stderr


@pytest.fixture
def hydra_config() -> Iterator[Callable[[str], None]]:
    """Sets the config of a running Hydra job of the given mode, as `hydra.main` does."""

    def set_mode(mode: str) -> None:
        with initialize(version_base="1.3", config_path=None):
            HydraConfig.instance().set_config(compose(overrides=[f"hydra.mode={mode}"], return_hydra_config=True))

    before = HydraConfig.instance().cfg
    yield set_mode
    HydraConfig.instance().cfg = before
    GlobalHydra.instance().clear()


def two_rank_trainer() -> Trainer:
    return Trainer(strategy="fourmin", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)


def test_single_hydra_run_may_run_the_command_again(hydra_config: Callable[[str], None]) -> None:
    hydra_config("RUN")
    assert two_rank_trainer().world_size == 2


def test_hydra_multirun_may_run_where_a_launcher_made_the_ranks(
    hydra_config: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hydra_config("MULTIRUN")
    with pytest.raises(RuntimeError, match="Use strategy='fourmin_spawn'"):
        two_rank_trainer()
    # A child of Lightning's own launcher, or a rank that the user started by hand.
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert two_rank_trainer().world_size == 2


# On two ranks.


def error_of_fit(strategy_kwargs: dict[str, Any], net: nn.Module, **trainer_kwargs: Any) -> str:
    """Type and text of the error that a fit ends with."""
    trainer = rank_trainer(FourMinStrategy(**strategy_kwargs), max_steps=1, **trainer_kwargs)
    try:
        trainer.fit(Regression(net), data(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_table_of_another_topology_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "measured_elsewhere.csv"
    write_table(AllReduceTable.from_cost_model(Topology.build([0, 0, 1, 1]), "gloo"), path)
    errors = ranks.run(error_of_fit, {"table": path}, nn.Linear(4, 4))
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"ValueError: table='{path}' was measured for topology_key 'nodes2x2_groups2x2'")
    assert "but this run has 'nodes1x2_groups1x2'" in errors[0]


def test_missing_table_is_named_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks.run(error_of_fit, {"table": str(tmp_path / "nowhere.csv")}, nn.Linear(4, 4))
    assert errors[0] == errors[1]
    assert errors[0] == f"ValueError: table='{tmp_path / 'nowhere.csv'}' cannot be read: No such file or directory"


def test_torus_on_unequal_groups_is_refused_on_all_ranks(ranks: RankPool) -> None:
    errors = ranks.run(error_of_fit, {"algorithm": "torus", "group_size": 2}, nn.Linear(4, 4), world=3)
    assert len(set(errors)) == 1
    assert errors[0].startswith("ValueError: algorithm='torus' is not in the table of nodes1x3_groups1x2+1x1")


class EnvironmentOfThree(PoolEnvironment):
    """Claims a rank more than there is."""

    def world_size(self) -> int:
        return 3


def fit_in_environment_of_three() -> str:
    return error_of_fit({}, nn.Linear(4, 4), plugins=[EnvironmentOfThree()])


def test_process_group_of_another_size_is_refused(ranks: RankPool) -> None:
    for error in ranks.run(fit_in_environment_of_three):
        assert error.startswith(
            "RuntimeError: the process group has 2 ranks but the launcher says 3: it is of an earlier"
        )


def fit_on_three_devices() -> str:
    return error_of_fit({}, nn.Linear(4, 4), devices=3)


def test_fewer_tasks_than_devices_are_refused(ranks: RankPool) -> None:
    """As on SLURM without srun, where one task would train alone."""
    for error in ranks.run(fit_on_three_devices):
        assert error.startswith("RuntimeError: node 0 runs 2 ranks but its Trainer asks for 3: make devices equal to")


def test_sparse_layers_that_are_not_trained_are_not_refused(ranks: RankPool) -> None:
    table = nn.Embedding.from_pretrained(torch.ones(4, 4), freeze=True, sparse=True)
    net = nn.Linear(4, 4)
    net.table = table
    assert ranks.run(error_of_fit, {}, net) == ["no error"] * 2


@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(ranks: RankPool, embedding: type[nn.Module]) -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), embedding(4, 4, sparse=True)), nn.Linear(4, 4))
    for error in ranks.run(error_of_fit, {}, net):
        assert error.startswith("ValueError: net.0.1 makes sparse gradients")
        assert "build it with sparse=False, or use strategy='ddp'" in error


def test_complex_gradients_are_refused_on_another_wire(ranks: RankPool) -> None:
    net = nn.Linear(4, 4)
    net.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    for error in ranks.run(error_of_fit, {"wire_dtype": "fp16"}, net):
        assert error.startswith(
            "ValueError: net.phase has complex gradients, which do not fit into float16 on the wire"
        )


def fit_without_a_cache() -> str:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        warnings.simplefilter("always")
        assert error_of_fit({"table": "auto"}, nn.Linear(4, 4)) == "no error"
        return " ".join(str(warning.message) for warning in caught)


def test_a_cache_that_cannot_be_written_costs_the_table_only(ranks: RankPool) -> None:
    told, silent = ranks.run(fit_without_a_cache)
    assert "the table is not kept for later runs: /dev/null/lightning_fourmin" in told
    assert "not kept" not in silent


def test_module_without_gradients_gets_torch_s_own_error(ranks: RankPool) -> None:
    for error in ranks.run(error_of_fit, {}, nn.Linear(4, 4).requires_grad_(False)):
        assert error.startswith("RuntimeError: DistributedDataParallel is not needed when a module doesn't have any")


def pickle_after_fit() -> tuple[int, int]:
    strategy = FourMinStrategy()
    trainer = rank_trainer(strategy, max_steps=1)
    trainer.fit(Regression(nn.Linear(4, 4)), data(4))
    sent = pickle.loads(pickle.dumps(strategy))
    return sent.topology.world_size, len(sent.fusion_plan.buckets)


def test_strategy_pickles_after_a_fit(ranks: RankPool) -> None:
    """A second fit of the same Trainer spawns again."""
    assert ranks.run(pickle_after_fit) == [(2, 1)] * 2
