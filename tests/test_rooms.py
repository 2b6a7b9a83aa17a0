"""The architecture as tests: which module may import which.

The tests read the source as syntax trees and run none of it but the table of trainers. They cover a new file in a
folder without a change here. A new folder needs a line in FLOORS.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path

import pytest

import ckptkit
from ckptkit.trainers.table import TRAINERS as KNOWN_TRAINERS
from tests.source import PACKAGE, PATHS, nodes

# The folder of each format.
READERS = tuple(sorted(f"formats.{path.parent.name}" for path in PACKAGE.glob("formats/*/format.py")))

# The floors, from the bottom up, as CONTRIBUTING.md lists them. A module imports only from floors below its own; inside
# a floor modules may import each other, in one direction. Formats never import each other, and what they share lies
# below them.
FLOORS = (
    ("errors", "version", "progress", "settings", "collector", "plugins"),
    ("pictures.markup", "pictures.numbers", "pictures.words"),  # arithmetic on text alone
    ("summary",),
    ("files.system", "files.stores"),
    ("files.stores.*",),
    ("files.path", "files.joined"),
    ("files.local", "files.ranges", "files.origin"),
    ("files", "files.*"),
    ("destinations", "destinations.*"),
    ("tensors", "tensors.*"),
    ("names.renames", "names.wrappers"),  # arithmetic on names alone
    ("layout",),
    ("layout.*",),
    ("engine", "engine.*"),
    ("formats.json_text", "formats.each_file", "formats.protocols"),
    ("formats.indices", "formats.safetensors_headers"),
    ("formats.pickles", "formats.pickles.*"),
    ("formats.archives", "formats.archives.*"),
    ("formats.shards", "formats.shards.*"),
    (*READERS, *(f"{reader}.*" for reader in READERS)),
    ("formats",),
    ("trainers", "trainers.*"),
    ("models", "models.*"),
    ("names", "names.*"),
    ("optimizers", "optimizers.*"),
    tuple(f"checkpoints.{name}" for name in ("account", "manifest", "problems", "replicas", "several_disks")),
    ("checkpoints.component", "checkpoints.evidence", "checkpoints.seal"),
    ("checkpoints.find_components",),
    ("checkpoints", "checkpoints.*"),
    ("examination", "examination.*"),
    ("runs", "runs.*"),
    # what recognizes quantized weights and computes them lies below conversions; the steps that change them lie above
    tuple(f"quantized.{name}" for name in ("grouped_blocks", "plain_blocks")),
    tuple(
        f"quantized.{name}" for name in ("config", "find", "foreign", "packed", "require_plain", "signs", "stored.*")
    ),
    ("conversion", "conversion.*"),
    ("quantized", "quantized.*"),
    ("adapters", "adapters.*"),
    ("comparison", "comparison.*"),
    ("salvaging", "salvaging.*"),
    ("deltas", "deltas.*"),
    ("pictures", "pictures.*"),
    ("inspection", "inspection.*"),
    ("diagnosis", "diagnosis.*"),
    # verbs that look, and the one that every conversion is a preset of; the presets and verify; what uses both
    tuple(f"ops.{name}" for name in ("convert", "diff", "inspect", "ls", "open", "own_files", "stats")),
    ("ops.as_consolidated",),
    tuple(f"ops.{name}" for name in ("average", "consolidate", "finalize", "merge", "reshard", "verify")),
    tuple(f"ops.{name}" for name in ("demote", "dry_run_fix", "manifest", "pin")),
    ("ops", "ops.*"),
    ("proving", "proving.*", "watching", "watching.*"),
    ("storage", "storage.*"),
    ("hub", "hub.*"),
    ("training.models.config",),
    ("estimates", "estimates.*"),
    ("training", "training.*"),
    ("integrations", "integrations.*"),
    ("reports", "reports.*"),
    ("cli", "cli.*"),
    ("__main__",),
)

# Pairs of rooms that never meet, in either direction.
STRANGERS = (
    ("files*", "layout"),
    ("files*", "tensors*"),
    ("engine*", "formats*"),
    ("training*", "formats*"),
    ("training*", "engine.copy"),
    ("cli*", "tensors.box"),
    ("cli*", "tensors.blocks"),
)

TORCH_AT_THE_TOP = (
    *("training.*", "training", "storage.*", "storage"),
    *("names.moved", "proving.forward", "integrations.lightning", "integrations.vllm_deltas"),
)
TORCH_WHEN_USED = (
    "tensors.arrays",
    "conversion.torchrun",
    "ops.open",
    "integrations.lazy_state_dict",
    "models.transformers_model",
    *("tensors.dtypes", "conversion.options", "estimates.estimate"),  # for types alone
    *("integrations.read_ahead", "integrations.vllm_loader", "integrations.loaded_weights"),
)

FORMATS = frozenset({"dcp", "distcp", "hf", "safetensors", "pt", "pickle", "deepspeed", "megatron", "accelerate"})

# Packages that rooms do without: numbers are not read where only places are known, threads belong to the engine, and
# what people see is made at the top.
DONE_WITHOUT = {
    "layout*": {"numpy", "torch", "os", "mmap"},
    "formats*": {"threading", "concurrent", "numpy", "tqdm", "typer"},
    "engine*": {"tqdm", "typer"},
    "trainers*": {"numpy", "struct"},
    "names*": {"numpy", "struct"},
    "checkpoints*": {"numpy", "struct"},
    "ops*": {"struct", "mmap"},
    "cli*": {"numpy", "struct", "mmap"},
}

# Rooms in which no format may be named, neither in an identifier nor in a string; `hf` is also the scheme of URLs.
SCHEMES = {"destinations*": {"hf"}}
NAMELESS = ("files.[!ps]*", "files.system", "destinations*", "engine*", "layout*", "tensors*")

# Strings by which a format is known, and the one file that may hold them, beside the table of formats.
MARKERS = {".distcp": "formats.dcp.read_metadata", "weight_map": "formats.indices"}

# The trainers of which nothing but their table may speak, and the one module that has to: classes in a pickle are told
# by the module that they are of.
TRAINERS = {trainer.name for trainer in KNOWN_TRAINERS.own.values()} - {"ckptkit", "transformers", "torch"}
PICKLED = {"formats.dcp.read_metadata": {"megatron", "olmo"}}
# A format that only one trainer writes may say who.
WRITTEN_BY: dict[str, set[str]] = {
    "formats": {"deepspeed", "megatron", "orbax"},  # the table
    "formats.orbax*": {"orbax"},
    "trainers.foreign": {"nemo", "skyrl"},  # archives of theirs
    "formats.hf.format": {"skyrl", "slime"},  # whose weight updates it refuses
    "formats.ranks.write_files": {"skyrl"},  # an entry of its
    "formats.pt.format": {"megatron"},  # a file name of its
    "formats.dcp.model_space": {"megatron"},
    "names.tables.megatron_*": {"megatron"},
    "names.group_map": {"megatron"},  # which keeps that map
    "optimizers.masters": {"megatron"},  # whose names for masters it knows
    "formats.megatron*": {"megatron"},
    "formats.deepspeed*": {"deepspeed"},
    "adapters*": {"peft"},  # what it saves is what all that load adapters read
    "adapters.config": {"megatron"},  # a key of it
    "adapters.trainer_names": {"megatron"},  # whose trainers have names of their own
    "adapters.expert_pairs": {"megatron", "nemo", "skyrl", "vllm"},  # each stores experts in another form
    "names.wrappers": {"peft"},  # whose wrapper puts words into names
    "training.models.lora": {"peft"},
    "training.smoke*": {"peft"},
    "ops.merge": {"peft"},
    "conversion.options": {"peft"},  # a layout of adapters has its name
    "deltas.nan": {"vllm"},  # which refuses it
    "quantized*": {"vllm"},  # which loads what is quantized
    "integrations.lightning": {"lightning"},
    "integrations.transformers": {"deepspeed"},  # which takes over how a model is loaded
    "integrations.vllm_loader": {"vllm"},
    "integrations.vllm_deltas": {"vllm"},
    "integrations.delta_patches": {"vllm"},  # as which it patches
    "diagnosis.group_map": {"megatron"},  # which keeps that map
    "diagnosis.messages": {"accelerate", "deepspeed", "verl"},  # whose words they are
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


@cache
def floor_of(module: str) -> int:
    exact = [i for i, rooms in enumerate(FLOORS) if module in rooms]
    matching = [i for i, rooms in enumerate(FLOORS) if any(fnmatchcase(module, room) for room in rooms)]
    assert matching, f"`{module}` has no floor: give it one in FLOORS"
    return (exact or matching)[0]


def share_a_folder(one: str, other: str) -> bool:
    """True for modules of one floor that may import each other: not for those of two formats."""
    first, second = (name.split(".") for name in (one, other))
    depth = 2 if first[0] == "formats" else 1
    return first[:depth] == second[:depth]


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


@each_module
def test_imports_go_down(module: Module) -> None:
    for found in module.imports if module.name else ():  # the package itself stands above all
        if found.is_ours and found.module and found.module != module.name:
            below, here = floor_of(found.module), floor_of(module.name)
            allowed = below < here or (below == here and share_a_folder(module.name, found.module))
            assert allowed, f"{module.path}:{found.line}: `{module.name}` may not import `{found.module}`"


def test_no_import_cycles_even_inside_functions() -> None:
    edges = {module.name: {i.module for i in module.imports if i.is_ours and i.module} for module in ROOMS}
    edges = {name: targets - {name} for name, targets in edges.items()}
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert not edges, f"a cycle runs through {sorted(edges)}"


@pytest.mark.parametrize("pair", STRANGERS, ids=" ".join)
def test_strangers_never_meet(pair: tuple[str, str]) -> None:
    for one, other in (pair, pair[::-1]):
        for module in ROOMS:
            if module.is_in(one):
                met = [i for i in module.imports if i.is_ours and fnmatchcase(i.module, other)]
                assert not met, f"{module.path}:{met[0].line}: `{module.name}` may not import `{met[0].module}`"


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
    if module.name in ("trainers.table", "names"):  # the lists of them
        return
    words = re.findall(r"[a-z0-9]+", module.path.read_text().lower())
    own = {trainer for room, trainers in WRITTEN_BY.items() if module.is_in(room) for trainer in trainers}
    named = TRAINERS & set(words) - {module.name.rpartition(".")[2]} - PICKLED.get(module.name, set()) - own
    assert not named, f"{module.path}: names {sorted(named)}"


@each_module
def test_only_the_cli_prints(module: Module) -> None:
    if not module.is_in("cli", "cli.*"):
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
