"""A verb as a Hydra app: its config from the tree, its options checked, mistakes of its user as one sentence."""

import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_fourmin.errors import FourMinError, PlanError

CONF = Path(str(import_module("lightning_fourmin.conf").__file__)).parent

_Options = TypeVar("_Options")


def run(verb: str, kind: type[_Options], work: Callable[[_Options], None]) -> None:
    """Calls `work` with the options of a verb, made from conf/<verb>.yaml and the command line.

    Args:
        verb: the name of the verb and of its config.
        kind: the dataclass of the options, which is also their schema.
        work: what the verb does; a FourMinError and an OSError of it end the command with a sentence.
    """

    def task(config: DictConfig) -> None:
        try:
            given = _with_paths_as_text(_with_net_of_model(config), kind)
            options = OmegaConf.to_object(OmegaConf.merge(_schema(kind), given))
            assert isinstance(options, kind)
            work(options)
        except MissingMandatoryValue:
            missing = ", ".join(sorted(OmegaConf.missing_keys(config)))
            give_up(verb, f"{missing}: not given; `fourmin {verb} --help` lists the keys")
        except OmegaConfBaseException as error:
            give_up(verb, f"{error.full_key}: {str(error.msg).splitlines()[0]}")
        except FourMinError as error:
            give_up(verb, str(error))
        except OSError as error:
            _give_up_on_file(verb, error)

    run_hydra(verb, task)


def _schema(kind: type) -> DictConfig:
    """The dataclass as a config into which others can be merged."""
    schema: DictConfig = OmegaConf.structured(kind)
    for name in schema:
        if not OmegaConf.is_missing(schema, name) and OmegaConf.is_dict(schema[name]):
            # OmegaConf merges into a frozen dataclass, but not into one inside another.
            OmegaConf.set_readonly(schema[name], False)
    return schema


def _with_net_of_model(config: DictConfig) -> DictConfig:
    """Name and options of the net that was chosen in place of its config, which is made for training."""
    if not isinstance(config.get("model"), DictConfig):
        return config
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+~").partition("=")[0]
        if key.startswith("model.") and key.split(".")[1] not in ("model", "model_options"):
            raise PlanError(f"{key} is for training: of a model only its name and model.model_options count here")
    named = OmegaConf.masked_copy(config, [str(key) for key in config if key != "model"])
    OmegaConf.set_struct(named, False)
    named["model"] = config.model.model
    written = OmegaConf.to_container(config.model)
    assert isinstance(written, dict)
    options = written.get("model_options")
    if isinstance(options, dict):
        # Only a training has data.
        options = {name: value for name, value in options.items() if not str(value).startswith("${data.")}
    named["model_options"] = options
    return named


def _with_paths_as_text(config: DictConfig, kind: type) -> DictConfig:
    """Numbers become text where a path is wanted: the folders of a sweep's jobs have numbers as names."""
    for name, hint in get_type_hints(kind).items():
        if Path in (hint, *get_args(hint)) and type(value := config.get(name)) is int:
            config[name] = str(value)
    return config


def run_hydra(verb: str, task: Callable[[DictConfig], Any]) -> None:
    """Calls `task` with the config of a verb; mistakes in the command line end with a sentence, without a traceback."""
    # Modules of the user's own are found as `python -m` would find them; last, so that no file there hides a package.
    sys.path.append(os.getcwd())
    wants_traceback = "HYDRA_FULL_ERROR" in os.environ
    # Hydra prints errors in its own way and exits; asked for them in full, it raises them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    in_task = False

    def watched(config: DictConfig) -> Any:
        nonlocal in_task
        in_task = True
        result = task(config)
        in_task = False
        return result

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=verb)(watched)()
    except HydraException as error:
        if wants_traceback:
            raise
        give_up(verb, _explained(error, verb))
    except ValueError as error:
        # Hydra has no exception of its own for group=null. A ValueError of the task is a bug and keeps its traceback.
        if wants_traceback or in_task:
            raise
        give_up(verb, f"{error}: a group is left out with ~GROUP, not with GROUP=null")
    except OSError as error:  # of a folder that Hydra cannot make
        _give_up_on_file(verb, error)
    finally:
        if not wants_traceback:
            del os.environ["HYDRA_FULL_ERROR"]


def _explained(error: HydraException, verb: str) -> str:
    """A sentence for an error of Hydra's about the arguments of a verb; its messages have several lines."""
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} is not understood: arguments are key=value, and values with special signs need quotes"
        )
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        known = sorted(set(error.options))
        near = get_close_matches(option, known, n=1)
        meant = f": did you mean {near[0]}?" if near else ""
        return f"{group}={option} is not known{meant}; {group} is one of {', '.join(known)}"
    if isinstance(error, ConfigCompositionException):
        first_line = str(error).splitlines()[0].rstrip(".")
        return f"{first_line}: `fourmin {verb} --help` lists the keys"
    return str(error)


def _give_up_on_file(verb: str, error: OSError) -> NoReturn:
    """Ends the command with the name of the file; a reader of the output that is gone is no mistake."""
    if isinstance(error, BrokenPipeError):
        raise error
    give_up(verb, f"{error.filename}: {error.strerror}" if error.filename else str(error))


def give_up(verb: str, why: str) -> NoReturn:
    """Ends the command with a sentence and exit code 1."""
    print(f"fourmin {verb}: {why}", file=sys.stderr)
    sys.exit(1)
