"""The architecture as tests: what each room does without.

The tests read the source as syntax trees and run none of it but the table of trainers. They cover a new file in a
folder without a change here. Which room may import which, import-linter checks: see pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import pytest

import ckptkit
from ckptkit.trainers.table import TRAINERS as KNOWN_TRAINERS
from tests.source import PACKAGE, PATHS, nodes

TORCH_AT_THE_TOP = (
    *("training.*", "training", "storage.*", "storage"),
    *(
        "models.names.tensor_tracing",
        "integrations.lightning",
        "integrations.background",
        "plugins.deltas.vllm_engine",
        "plugins.prove.forward",
    ),
)
TORCH_WHEN_USED = (
    "state.write_output",
    "checks.open",
    "integrations.transformers",
    "models.transformers_model",
    *("layout.dtypes", "state.options", "plugins.estimate.estimate"),  # for types alone
    *("integrations.loaded_weights", "plugins.vllm.loader"),
)

FORMATS = frozenset({"dcp", "distcp", "hf", "safetensors", "pt", "pickle", "deepspeed", "megatron", "accelerate"})

# Packages that rooms do without: numbers are not read where only places are known, threads belong to the engine, and
# what people see is made at the top.
DONE_WITHOUT = {
    "formats*": {"threading", "concurrent", "numpy", "tqdm", "typer"},
    "engine*": {"tqdm", "typer"},
    "trainers*": {"numpy", "struct"},
    "models.names*": {"numpy", "struct"},
    "checkpoints*": {"numpy", "struct"},
    "c[!l]*": {"mmap"},
    "cli*": {"numpy", "struct", "mmap"},
}

# Rooms in which no format may be named, neither in an identifier nor in a string; `hf` is also the scheme of URLs.
SCHEMES = {"io*": {"hf"}}
NAMELESS = ("io.[!p]*", "engine*", "layout*")

# Strings by which a format is known, and the one file that may hold them, beside the table of formats.
MARKERS = {".distcp": "formats.dcp.read_metadata", "weight_map": "formats.index_file"}

# The trainers of which nothing but their table may speak, and the one module that has to: classes in a pickle are told
# by the module that they are of.
TRAINERS = {trainer.name for trainer in KNOWN_TRAINERS.own.values()} - {"ckptkit", "transformers", "torch"}
PICKLED = {"formats.dcp.read_metadata": {"megatron", "olmo"}}
# A format that only one trainer writes may say who.
WRITTEN_BY: dict[str, set[str]] = {
    "formats": {"deepspeed", "megatron", "orbax"},  # the table
    "plugins.orbax*": {"orbax"},
    "trainers": {"nemo", "skyrl"},  # archives of theirs
    "formats.hf": {"skyrl", "slime"},  # whose weight updates it refuses
    "formats.ranks.write_files": {"skyrl"},  # an entry of its
    "formats.pt": {"megatron"},  # a file name of its
    "formats.dcp.format": {"megatron"},
    "state.master_weights": {"megatron"},  # whose names for masters it knows
    "plugins.megatron*": {"megatron", "peft"},
    "plugins.deepspeed*": {"deepspeed"},
    "adapters*": {"peft"},  # what it saves is what all that load adapters read
    "adapters.config": {"megatron"},  # a key of it
    "models.adapter_config_differences": {"peft", "megatron"},  # whose keys the adapter's config has
    "models.config_differences": {"peft", "diffusers"},  # whose versions config.json has
    "adapters.find": {"megatron"},  # whose trainers have names of their own
    "plugins.expert_adapters*": {"megatron", "nemo", "peft", "skyrl", "vllm"},  # each stores experts in another form
    "layout.wrappers": {"peft"},  # whose wrapper puts words into names
    "training.models.lora": {"peft"},
    "training.smoke*": {"peft"},
    "conversion.combine": {"peft"},
    "state.options": {"peft"},  # a layout of adapters has its name
    "plugins.deltas.*": {"vllm"},  # which applies them
    "state.quantized*": {"vllm"},  # which loads what is quantized
    "plugins.quantize*": {"vllm"},
    "integrations.lightning": {"lightning"},
    "integrations.transformers": {"deepspeed"},  # which takes over how a model is loaded
    "integrations.accelerate": {"accelerate", "deepspeed", "megatron"},  # which save their own files
    "integrations.trainer": {"accelerate"},  # which saves for a Trainer
    "plugins.vllm*": {"vllm"},
    "plugins.doctor.optimizer": {"megatron"},  # which keeps a map of groups
    "plugins.doctor.known_errors": {"accelerate", "deepspeed", "verl"},  # whose words they are
}

IDENTIFIERS = frozenset({"id", "attr", "arg", "name", "asname", "module"})  # fields of nodes
SHUNNED = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "base", "misc"}


@dataclass(frozen=True)
class Import:
    module: str  # relative to the package for our own, the first part of the name for others
    line: int
    at_top: bool
    is_ours: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the syntax tree, the module first."""
        return nodes(self.path)

    @property
    def tree(self) -> ast.Module:
        tree = self.nodes[0]
        assert isinstance(tree, ast.Module)
        return tree

    def is_in(self, *rooms: str) -> bool:
        return any(fnmatchcase(self.name, room) for room in rooms)

    @cached_property
    def imports(self) -> list[Import]:
        return [found for node in self.nodes for found in self._imports_of(node)]

    def _imports_of(self, node: ast.AST) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{self.path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            return
        for name in names:
            first, _, rest = name.partition(".")
            ours = first == PACKAGE.name
            yield Import(longest_module(rest) if ours else first, node.lineno, node in self.tree.body, ours)

    @cached_property
    def words(self) -> dict[str, int]:
        """Every part of every identifier, lower case, with a line where it occurs."""
        return {
            word.lower(): line
            for name, line in identifiers(self.nodes)
            for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
        }

    @cached_property
    def strings(self) -> dict[str, int]:
        """Every string that is not documentation, with its line."""
        documentation = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        return {
            node.value: node.lineno
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
        }


def identifiers(tree: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in tree:
        for field in IDENTIFIERS.intersection(node._fields):
            value = getattr(node, field)
            if isinstance(value, str):
                yield value, getattr(node, "lineno", 0)


def find_modules() -> dict[str, Module]:
    modules = {}
    for path in PATHS:
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        modules[name] = Module(name, path)
    return modules


MODULES = find_modules()
ROOMS = [module for name, module in MODULES.items() if name]  # all but the package's own `__init__`


def longest_module(name: str) -> str:
    """The module of ours that `name`, a module or something in one, lies in; "" for the package itself."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def each_module(check: Callable[[Module], None]) -> Callable[[], None]:
    """Make a test of all modules from the check of one; it lists everything that is wrong."""

    def test() -> None:
        wrong = []
        for module in MODULES.values():
            try:
                check(module)
            except AssertionError as error:
                wrong.append(str(error))
        assert not wrong, "\n".join(wrong)

    return test


def test_no_import_cycles_even_inside_functions() -> None:
    edges = {module.name: {i.module for i in module.imports if i.is_ours and i.module} for module in ROOMS}
    edges = {name: targets - {name} for name, targets in edges.items()}
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert not edges, f"a cycle runs through {sorted(edges)}"


@each_module
def test_torch_stays_where_it_belongs(module: Module) -> None:
    found = [i for i in module.imports if i.module == "torch" and not i.is_ours]
    if module.is_in(*TORCH_WHEN_USED):
        found = [i for i in found if i.at_top]
    elif module.is_in(*TORCH_AT_THE_TOP):
        found = []
    assert not found, f"{module.path}:{found[0].line}: torch is imported"


@pytest.mark.parametrize("name", TORCH_WHEN_USED)
def test_torch_is_used_where_it_may_be(name: str) -> None:
    assert any(i.module == "torch" and not i.is_ours for i in MODULES[name].imports)


@each_module
def test_rooms_do_without_packages(module: Module) -> None:
    unwanted = {package for room, packages in DONE_WITHOUT.items() if module.is_in(room) for package in packages}
    found = [i for i in module.imports if not i.is_ours and i.module in unwanted]
    assert not found, f"{module.path}:{found[0].line}: imports {found[0].module}"


@each_module
def test_the_core_names_no_format(module: Module) -> None:
    if not module.is_in(*NAMELESS):
        return
    said = module.words | {
        word: line for text, line in module.strings.items() for word in re.findall(r"[a-z0-9]+", text.lower())
    }
    schemes = {scheme for room, found in SCHEMES.items() if module.is_in(room) for scheme in found}
    named = (FORMATS & said.keys()) - schemes
    assert not named, f"{module.path}: names {[f'{word} (line {said[word]})' for word in sorted(named)]}"


@pytest.mark.parametrize("marker", MARKERS)
def test_marker_words_stay_in_one_file(marker: str) -> None:
    holders = {module.name for module in ROOMS if any(marker in text for text in module.strings)}
    assert holders <= {MARKERS[marker], "formats"}


@each_module
def test_a_trainer_is_named_in_the_table_only(module: Module) -> None:
    if module.name in ("trainers.table", "models.names"):  # the lists of them
        return
    words = re.findall(r"[a-z0-9]+", module.path.read_text().lower())
    own = {trainer for room, trainers in WRITTEN_BY.items() if module.is_in(room) for trainer in trainers}
    named = TRAINERS & set(words) - {module.name.rpartition(".")[2]} - PICKLED.get(module.name, set()) - own
    assert not named, f"{module.path}: names {sorted(named)}"


@each_module
def test_only_the_cli_prints(module: Module) -> None:
    if not module.is_in("cli", "cli.*", "plugins.*command", "plugins.deltas.kind", "plugins.report.shard_map"):
        given = {"stdout", "stderr"} if module.is_in("integrations.*") else set()  # what a child of theirs prints
        assert not ({"print", "stdout", "stderr"} - given) & module.words.keys(), f"{module.path} prints"


def test_errors_end_in_one_place() -> None:
    """Anyone may catch a CkptError to say more, and raise it again or report it; only the cli may end it."""
    ends = [
        f"{module.name}:{node.lineno}"
        for module in ROOMS
        if not module.is_in("training.*", "storage.*", "storage")
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "CkptError"
        if not any(isinstance(inner, ast.Raise) or is_report(inner) for inner in ast.walk(node))
    ]
    assert len(ends) <= 1, ends
    assert all(end.startswith("cli") for end in ends), ends


def test_one_function_tells_remote_paths_from_local_ones() -> None:
    tests = [
        f"{module.name}:{node.lineno}"
        for module in ROOMS
        for node in module.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and "RemotePath" in ast.unparse(node)
    ]
    assert [name.partition(":")[0] for name in tests] == ["io.path"], tests


def is_report(node: ast.AST) -> bool:
    """True for `report(...)`, and for `problems.add(...)` by whoever collects what is reported."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("report", "problems.add")


@each_module
def test_names_say_something(module: Module) -> None:
    assert not set(module.name.split(".")) & SHUNNED, f"{module.path}: a name that says nothing"


@each_module
def test_modules_say_what_is_in_them(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.path} has no docstring"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ckptkit", ("torch", "numpy", "safetensors", "typer")),
        ("ckptkit.cli", ("torch", "numpy", "transformers", "huggingface_hub")),
    ],
)
def test_importing_stays_light(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(set({absent!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_public_names_are_no_modules() -> None:
    """A module that was imported would stand in the place of the function of its name."""
    assert not set(ckptkit.__all__) & MODULES.keys()
