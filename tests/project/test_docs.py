"""The documentation: commands compose, Python blocks import, links lead somewhere, nothing public is left out."""

import ast
import importlib
import inspect
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

import lightning_fourmin as fm
from lightning_fourmin.allreduce.plan import CommOptions
from lightning_fourmin.cli import VERBS
from lightning_fourmin.cli.hydra_app import CONF
from lightning_fourmin.models import MODELS
from pictures import draw_all
from readme import filled

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
PAGES = sorted([*REPO.glob("*.md"), *DOCS.rglob("*.md"), *(REPO / "examples").rglob("*.md")])
SCRIPTS = sorted((REPO / "examples").rglob("*.sh"))
PROGRAMS = {"fourmin", "torchrun", "srun", "sbatch", "make", "python", "sudo"}
RUNNABLE = ["index", "concepts/fusion", "concepts/lars", "guides/plug_in", "guides/pack", "guides/resume"]
"""Pages whose Python blocks take no time and no GPU."""
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SNIPPET = re.compile(r'^--8<-- "([^":]+)', re.MULTILINE)


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language in languages]


def commands(path: Path) -> Iterator[list[str]]:
    """Every command line of a page or script, as a shell splits it."""
    text = path.read_text()
    if path.suffix == ".sh":
        lines = text.replace("\\\n", " ").splitlines()
    else:
        lines = [line for block in blocks(text, "", "bash") for line in block.replace("\\\n", " ").splitlines()]
        lines += INLINE.findall(FENCE.sub("", text))
    for line in lines:
        if not line.split() or line.split()[0].rpartition("/")[2] not in PROGRAMS:
            continue
        words = [word for word in shlex.split(line, comments=True) if word != "$@"]
        if len(words) > 1:
            yield words


COMMANDS = sorted({(str(path.relative_to(REPO)), *words) for path in [*PAGES, *SCRIPTS] for words in commands(path)})


def check_fourmin(verb: str, *arguments: str) -> None:
    """Composes the config of a `fourmin` command, of each job if it is a sweep."""
    # As in `fourmin VERB --help`, and in the ends of sentences: `fourmin tune model=...`.
    if verb in ("VERB", "verb") or arguments in ((), ("-m",), ("--help",)):
        assert verb in (*VERBS, "VERB", "verb", "--version")
        return
    assert verb in VERBS
    if "--config-dir" in arguments:
        # Configs of the reader's own: `test_the_experiment_in_the_guide_composes`.
        return
    parsed = OverridesParser.create().parse_overrides([a for a in arguments if a not in ("-m", "...")])
    choices = [
        [f"{one.key_or_group}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [str(one.input_line)]
        for one in parsed
    ]
    assert ("-m" in arguments) == any(len(values) > 1 for values in choices)
    # Of a sweep each value once: the first of all, then the others beside the first of the rest.
    firsts = [values[0] for values in choices]
    jobs = [firsts] + [
        [*firsts[:place], value, *firsts[place + 1 :]] for place, values in enumerate(choices) for value in values[1:]
    ]
    for overrides in jobs:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose(verb, [override for override in overrides if not override.endswith("=...")])
        if verb == "train":
            # An experiment's options of one net do not suit another.
            inspect.signature(MODELS[config.model.model]).bind(10, **config.model.get("model_options", {}))


def check_command(words: list[str]) -> None:
    program, *arguments = words
    program = program.rpartition("/")[2]
    if program in ("sudo", "srun"):
        # Behind options of their own.
        names = [word.rpartition("/")[2] for word in arguments]
        check_command(arguments[next(place for place, name in enumerate(names) if name in PROGRAMS) :])
    elif program == "fourmin":
        check_fourmin(*arguments)
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (REPO / "Makefile").read_text(), re.MULTILINE)
    elif program == "torchrun":
        if "lightning_fourmin" in arguments:
            check_fourmin(*arguments[arguments.index("lightning_fourmin") + 1 :])
    elif arguments[0] == "-m":
        assert find_spec(arguments[1]) is not None
        assert all((REPO / word).exists() for word in arguments[2:] if word.endswith(".py"))
    else:
        script = REPO / arguments[0]
        assert script.is_file()
        if script.parent.name == "own_hydra_app":
            return
        if script.name == "lightning_cli.py":
            # Its flags are made of signatures: `test_lightning_cli.py` tries them.
            assert all((REPO / word).is_file() for word in arguments[1:] if word.endswith(".yaml"))
            return
        source = script.read_text()
        assert all(f'"{word}"' in source for word in arguments[1:] if word.startswith("--"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_exist(command: tuple[str, ...]) -> None:
    check_command(list(command[1:]))


def test_the_experiment_in_the_guide_composes(tmp_path: Path) -> None:
    (experiment,) = blocks((DOCS / "guides" / "own_images.md").read_text(), "yaml")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "photos.yaml").write_text(experiment)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", ["experiment=photos", f"hydra.searchpath=[file://{tmp_path}]"])
    assert (config.data.path, config.data.augment, config.model.model) == ("shards/photos", "flip", "resnet_small")


def test_all_pages_are_looked_at() -> None:
    """What the other tests stand on: pages, commands and blocks are found."""
    assert {"README.md", "CONTRIBUTING.md", "docs/guides/sweep.md", "examples/torchrun.md"} <= {
        str(path.relative_to(REPO)) for path in PAGES
    }
    seen = {words[1] for words in COMMANDS}
    assert {"fourmin", "make", "torchrun", "srun", "sbatch", "python"} <= seen
    assert {words[2] for words in COMMANDS if words[1] == "fourmin"} >= set(VERBS)
    assert any("-m" in words for words in COMMANDS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_links_and_snippets_lead_to_files(path: Path) -> None:
    text = path.read_text()
    for target in LINK.findall(FENCE.sub("", text)):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.partition("#")[0]).exists(), target
    for target in SNIPPET.findall(text):
        assert (REPO / target).is_file(), target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_python_blocks_import_and_call_what_is_there(path: Path) -> None:
    for block in blocks(path.read_text(), "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names), node.module
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fm":
                assert node.attr in fm.__all__, node.attr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                function = getattr(fm, node.func.attr, None)
                if isinstance(node.func.value, ast.Name) and node.func.value.id == "fm" and function is not None:
                    keywords = {str(keyword.arg): None for keyword in node.keywords}
                    inspect.signature(function).bind(*node.args, **keywords)


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed")
@pytest.mark.parametrize("page", RUNNABLE)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks((DOCS / f"{page}.md").read_text(), "python")
    assert found
    for block in found:
        exec(compile(block, page, "exec"), {})


def test_version(fourmin: Callable[..., tuple[int, str, str]]) -> None:
    assert fourmin("--version") == (0, f"fourmin {fm.__version__}\n", "")


def test_promises_name_tests_that_exist() -> None:
    text = (DOCS / "reliability.md").read_text()
    named = re.findall(r"`((?:test|soak)_\w+\.py)(?:::(\w+))?`", text)
    assert len(named) > 50
    for file, name in named:
        (path,) = (REPO / "tests").rglob(file)
        assert not name or f"def {name}(" in path.read_text(), f"{file}::{name}"


def test_tables_of_the_readme_are_those_of_the_results() -> None:
    text = (REPO / "README.md").read_text()
    assert filled(text) == text, "run python benchmarks/readme.py"


def words_of(picture: Path) -> list[str]:
    return [" ".join(text.itertext()) for text in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_pictures_are_of_this_code(tmp_path: Path) -> None:
    """Texts are compared, with the numbers in them; the points of curves may differ in a last digit elsewhere."""
    draw_all(tmp_path)
    drawn = {path.name: words_of(path) for path in tmp_path.iterdir()}
    assert {path.name: words_of(path) for path in (DOCS / "pictures").iterdir()} == drawn, "run python docs/pictures.py"
    shown = "\n".join(page.read_text() for page in (DOCS.parent / "README.md", *DOCS.rglob("*.md")))
    assert {name for name in drawn if f"pictures/{name})" not in shown} == set()


def test_public_names_are_in_the_reference() -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    assert {name for name in fm.__all__ if f"::: lightning_fourmin.{name}\n" not in text} == set()


def test_options_of_the_strategy_are_explained() -> None:
    explained = set(re.findall(r"^ {8}(\w+): ", str(fm.FourMinStrategy.__doc__), re.MULTILINE))
    assert {field.name for field in fields(CommOptions)} <= explained


def test_configs_results_and_models_are_in_the_docs() -> None:
    included = {target for path in DOCS.rglob("*.md") for target in SNIPPET.findall(path.read_text())}
    configs = {f"conf/{path.relative_to(CONF)}" for path in CONF.rglob("*.yaml")}
    results = {str(path.relative_to(REPO)) for path in (REPO / "benchmarks" / "results").glob("*.md")}
    assert (configs | results) - included == set()
    cards = (DOCS / "models.md").read_text()
    assert {name for name in MODELS if f"\n## {name}\n" not in cards} == set()


def test_every_page_is_in_the_navigation() -> None:
    text = (REPO / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert {page for page in pages if f": {page}\n" not in text} == set()


def test_citation_is_of_this_version_and_the_paper() -> None:
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    project = dict(re.findall(r'^(name|version) = "(.+)"$', (REPO / "pyproject.toml").read_text(), re.MULTILINE))
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])
    assert citation["references"][0]["url"].endswith("1807.11205")
