"""What was wrong with a command line, in a sentence that names what was probably meant."""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf


def explain(error: HydraException, verb: str, folder: Path, arguments: Sequence[str]) -> str:
    """A sentence for an error of Hydra's about the arguments of a verb, whose configs are in a folder."""
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} is not understood: arguments are key=value, and values with special signs need quotes"
        )
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        known = sorted(set(error.options))
        return f"{group}={option} is not known{_meant(option, known)}; {group} is one of {', '.join(known)}"
    if match := re.match(r"Could not override '(.+?)'", str(error)):
        key = match[1]
        hint = _meant(key, _keys(verb, folder, key, arguments)) or " (a new one is added with a +)"
        return f"there is no key {key}{hint}; `fourmin {verb} --help` lists the keys"
    return str(error)


def explain_null(folder: Path, arguments: Sequence[str]) -> str | None:
    """A sentence for `group=null`, for which Hydra has only a traceback; None if no argument is one."""
    for argument in arguments:
        group, _, value = argument.partition("=")
        if group and value == "null" and (folder / group).is_dir():
            if (folder / group / "none.yaml").is_file():
                return f"{argument} is not understood: write {group}=none"
            return f"{argument} is not understood: ~{group} leaves a group out that there is by default"
    return None


def _meant(word: str, known: Iterable[str]) -> str:
    """The nearest of the known words as a question; keys may be meant by their last part."""
    known = list(known)
    same_end = [key for key in known if key.endswith(f".{word}")]
    near = same_end or get_close_matches(word, known, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _keys(verb: str, folder: Path, wrong: str, arguments: Sequence[str]) -> list[str]:
    """All keys of the verb's config, those that its other arguments bring along included."""
    others = [text for text in arguments if re.match(r"~|[^-].*=", text) and wrong not in text]
    for overrides in (others, []):
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(folder), version_base="1.3"):
                config = compose(verb, overrides, return_hydra_config=True)
            groups = [str(group) for group in config.hydra.runtime.choices]
            return [*groups, *_walk(OmegaConf.to_container(config))]
        except HydraException:
            continue
    return []


def _walk(config: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield f"{prefix}{key}"
            yield from _walk(value, f"{prefix}{key}.")
