"""Runs a verb: its config from the Hydra tree, its options checked, errors of its user as one sentence."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_fourmin.data.sample import ShardError
from lightning_fourmin.report.run_files import RunError

PACKAGE = Path(__file__).parents[1]
# In the wheel the tree is inside the package; in an editable install it is beside it.
CONF = next(path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir())

_Options = TypeVar("_Options")


def run(verb: str, kind: type[_Options], work: Callable[[_Options], None]) -> None:
    """Calls `work` with options of a dataclass made from conf/<verb>.yaml and the command line."""

    def task(config: DictConfig) -> None:
        try:
            options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), config))
            assert isinstance(options, kind)
            work(options)
        except MissingMandatoryValue:
            missing = ", ".join(sorted(OmegaConf.missing_keys(config)))
            _give_up(verb, f"{missing}: not given; `fourmin {verb} --help` lists the keys")
        except OmegaConfBaseException as error:
            _give_up(verb, f"{error.full_key}: {error.msg}")
        except (RunError, ShardError) as error:
            _give_up(verb, str(error))

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=verb)(task)()


def _give_up(verb: str, why: str) -> NoReturn:
    print(f"fourmin {verb}: {why}", file=sys.stderr)
    sys.exit(1)
