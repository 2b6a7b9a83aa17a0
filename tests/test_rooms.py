"""The architecture as a thing that breaks: who may import whom, and what each room of the house may not say.

Reads the source as syntax trees and runs none of it. A new file in a package is covered as it stands; a new module at
the top must be given a layer here, for that is a decision.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest

import ckptkit

PACKAGE = Path(__file__).parents[1] / "ckptkit"

# The folder of each format.
READERS = tuple(sorted(f"formats.{path.parent.name}" for path in PACKAGE.glob("formats/*/format.py")))

# From the bottom up. A module imports only from layers below its own.
LAYERS = (
    ("errors", "version", "progress", "collector", "settings", "files", "engine", "tensors"),
    ("files.system", "files.stores"),
    ("files.stores.*",),
    ("files.path", "files.joined"),
    ("files.local", "files.ranges", "files.origin"),
    ("files.crc32", "files.file", "tensors.*"),
    ("files.ahead",),
    ("files.allocation", "files.hidden", "files.folders", "files.locks", "files.temporary", "files.trees"),
    ("files.early_sync", "files.exchange"),
    ("files.staging",),
    ("files.publish",),
    ("layout",),
    ("axes",),
    ("edits", "plan"),
    ("engine.*",),
    (
        "formats.json_text",
        "formats.each_file",
        "formats.protocols",
        "formats.torchfile.inert_pickle",
        "formats.torchfile",
        *READERS,
    ),
    (
        "formats.indices",
        "formats.torchfile.zip_entries",
        "formats.torchfile.tensor_calls",
        "formats.torchfile.read_archive",
        "formats.torchfile.write_pickle",
        "formats.safetensors_headers",
    ),
    ("formats.torchfile.*",),
    tuple(f"{reader}.*" for reader in READERS),
    ("formats",),
    ("checkpoints", "checkpoints.*"),
    ("pictures.*", "pictures"),
    ("ops", "ops.*"),
    ("estimates", "estimates.*", "hub", "hub.*", "reports", "reports.*"),
    ("storage.*", "storage"),
    ("training.*", "training"),
    ("integrations.*", "integrations"),
    ("cli.*", "cli"),
    ("__main__",),
)

# Packages whose modules may also import each other, in one direction.
FAMILIES = (
    *("tensors", "engine", "formats.torchfile", *READERS, "checkpoints", "pictures"),
    *("ops", "estimates", "hub", "reports", "storage", "training", "cli", "integrations"),
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
    *("checkpoints.families.moved", "ops.proving.forward", "integrations.lightning"),
)
TORCH_WHEN_USED = (
    "tensors.arrays",
    "ops.conversion.torchrun",
    "ops.open",
    "checkpoints.families.transformers_linear",
    "checkpoints.families.transformers_model",
)

FORMATS = frozenset({"dcp", "distcp", "hf", "safetensors", "pt", "pickle", "deepspeed", "megatron", "accelerate"})

# Words that no identifier of a room may hold.
FORBIDDEN = {
    "tensors.box": {"path", "dtype", "torch", "open", "file", "offset"},
    "tensors.blocks": {"path", "dtype", "torch", "open", "file"},
    "layout": {"open", "torch", "numpy", "print"},
    "edits": {"open", "torch", "numpy", "print"},
    "plan": {"open", "torch", "numpy", "print"},
    "engine.copy": {"tqdm", "typer", "fqn", "print"},
    "engine.gather": {"threading", "tqdm", "typer", "fqn", "print"},
    "tensors.casting": {"path", "open", "fqn"},
    "tensors.counting": {"path", "open", "fqn"},
    "tensors.measuring": {"path", "open", "fqn"},
    "checkpoints*": {"numpy", "struct", "print"},
    "formats*": {"threading", "thread", "concurrent", "tqdm", "typer", "numpy", "print"},
    "ops*": {"struct", "pread", "preadv", "pwrite", "memoryview", "bytearray", "print", "exit"},
    "training*": {"chunk", "chunks", "zipfile", "struct", "header", "headers"},
    "cli*": {"open", "struct", "numpy", "box", "boxes"},
}

# Rooms in which no format may be named, neither in an identifier nor in a string; `hf` is also the scheme of URLs.
NAMELESS = ("files.[!ps]*", "files.staging", "files.system", "axes", "edits", "engine*", "layout", "plan", "tensors*")

# Strings by which a format is known, and the one file that may hold them, beside the table of formats.
MARKERS = {".distcp": "formats.dcp.names", "weight_map": "formats.indices"}

# The files of trainers of which nothing else in the package may speak, and the one module that has to: classes in a
# pickle are told by the module that they are of.
TRAINERS = {path.stem for path in (PACKAGE / "checkpoints" / "trainers").glob("*.py")} - {
    *("__init__", "trainer", "ckptkit", "transformers", "plain"),
}
PICKLED = {"formats.dcp.read_metadata": {"megatron", "olmo"}}
# A format that only one trainer writes may say who.
WRITTEN_BY: dict[str, set[str]] = {
    "formats": {"deepspeed", "llmc", "megatron"},  # the table
    "formats.dcp.flat_names": {"megatron"},
    "formats.dcp.model_space": {"megatron"},
    "formats.llmc*": {"llmc"},
    "checkpoints.families.megatron_args": {"megatron"},
    "formats.megatron*": {"megatron"},
    "formats.deepspeed*": {"deepspeed"},
    "checkpoints.adapters*": {"peft"},  # what it saves is what all that load adapters read
    "checkpoints.adapters.config": {"megatron"},  # a key of it
    "engine.low_rank": {"peft"},
    "training.models.lora": {"peft"},
    "training.smoke*": {"peft"},
    "engine.merge": {"peft"},
    "ops.conversion.adapters": {"peft"},
    "ops.conversion.merge": {"peft"},
    "ops.merge": {"peft"},
    "checkpoints.quantized*": {"vllm"},  # which loads what is quantized
    "integrations.lightning": {"lightning"},
    "ops.diagnosis.messages": {"accelerate", "deepspeed", "verl"},  # whose words they are
}

# The words with which docstrings begin: of modules and functions a verb, of classes a noun, of properties either.
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        Account Add Answer Append Arrange Arrive Ask Average Be Begin Bridge Build Call Carry Cast Change Check Choose
        Clear Clip Close Collect Combine Commit Compare Compile Complete Compose Compute Configure Consolidate Convert
        Copy Count Create Cut Deal Decide Decode Decompress Define Delete Demote Derive Describe Detect Diff Divide Do
        Draft Draw Drop Edit End Enter Estimate Execute Explain Export Extend Fetch Fill Finalize Find Finish Flatten
        Fold Follow Force Forget Format Free Freeze Gather Give Group Guard Handle Hide Hold Import Index Initialise
        Inspect Join Keep Know Launch Lay Leave Let Link List Load Locate Lock Look Lose Make Map Mark Match Materialise
        Measure Meet Mend Merge Mirror Move Name Note Number Open Pack Parse Pass Pause Pin Place Plan Prepare Print
        Prove Prune Publish Pull Push Put Quantize Raise Read Rearrange Recompute Record Reduce Refuse Release Remember
        Remove Rename Render Replace Report Reserve Reshard Resolve Restore Resume Return Round Run Salvage Save Say
        Scale Scan Seal See Select Send Set Shard Share Show Silence Sort Spell Spread Stage Start Stop Store Sum Survey
        Swap Sync Take Tell Think Tie Train Translate Try Turn Unflatten Unpin Update Verify Visit Wait Walk Warn Watch
        Work Write Yield
        """,
    )
)
ARTICLES = frozenset({"A", "An", "The", "All", "Every", "One", "Some", "Two"})
PLURALS = frozenset({"Bytes", "Counts", "Files", "Names", "Numbers", "Shares"})  # nouns that look like verbs
ODD = frozenset({"What", "How", "Where", "When", "Why", "Those", "Whatever", "Whoever", "By", "From", "Of", "With"})

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

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), self.path)

    def is_in(self, *rooms: str) -> bool:
        return any(fnmatchcase(self.name, room) for room in rooms)

    @cached_property
    def imports(self) -> list[Import]:
        return [found for node in ast.walk(self.tree) for found in self._imports_of(node)]

    def _imports_of(self, node: ast.AST) -> Iterator[Import]:
        at_top = node in self.tree.body
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
            yield Import(longest_module(rest) if ours else first, node.lineno, at_top, ours)

    @cached_property
    def words(self) -> dict[str, int]:
        """Every part of every identifier, lower case, with a line where it occurs."""
        return {
            word.lower(): line
            for name, line in identifiers(self.tree)
            for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
        }

    @cached_property
    def strings(self) -> dict[str, int]:
        """Every string that is not documentation, with its line."""
        documentation = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Expr)}
        return {
            node.value: node.lineno
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
        }


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value, line


def find_modules() -> dict[str, Module]:
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
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


def layer_of(module: str) -> int:
    exact = [i for i, rooms in enumerate(LAYERS) if module in rooms]
    matching = [i for i, rooms in enumerate(LAYERS) if any(fnmatchcase(module, room) for room in rooms)]
    assert matching, f"`{module}` has no layer: give it one in LAYERS"
    return (exact or matching)[0]


def is_family(one: str, other: str) -> bool:
    return any(f"{one}.".startswith(f"{family}.") and f"{other}.".startswith(f"{family}.") for family in FAMILIES)


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
        if found.is_ours and found.module and not is_family(module.name, found.module):
            below = layer_of(found.module) < layer_of(module.name)
            assert below, f"{module.path}:{found.line}: `{module.name}` may not import `{found.module}`"


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
def test_words_stay_in_their_rooms(module: Module) -> None:
    forbidden = {word for room, words in FORBIDDEN.items() if module.is_in(room) for word in words}
    said = forbidden & module.words.keys()
    assert not said, f"{module.path}: says {[f'{word} (line {module.words[word]})' for word in sorted(said)]}"


@each_module
def test_the_core_names_no_format(module: Module) -> None:
    if not module.is_in(*NAMELESS):
        return
    said = module.words | {
        word: line for text, line in module.strings.items() for word in re.findall(r"[a-z0-9]+", text.lower())
    }
    named = FORMATS & said.keys()
    assert not named, f"{module.path}: names {[f'{word} (line {said[word]})' for word in sorted(named)]}"


@pytest.mark.parametrize("marker", MARKERS)
def test_marker_words_stay_in_one_file(marker: str) -> None:
    holders = {module.name for module in ROOMS if any(marker in text for text in module.strings)}
    assert holders <= {MARKERS[marker], "formats"}


@each_module
def test_a_trainer_is_named_in_its_own_file_only(module: Module) -> None:
    if module.name in ("checkpoints.trainers", "checkpoints.families"):  # the lists of them
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
        for node in ast.walk(module.tree)
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
def test_modules_and_public_things_say_what_they_are(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.path} has no docstring"
    silent = [f"{name} (line {node.lineno})" for name, node in public(module.tree) if not ast.get_docstring(node)]
    assert not silent, f"{module.path}: no docstring on {silent}"


@each_module
def test_docstrings_begin_plainly(module: Module) -> None:
    things = [("the module", module.tree), *public(module.tree)]
    said = [(name, node, re.split(r"[ ,:.]", ast.get_docstring(node) or " ")[0]) for name, node in things]
    odd = [f"{name}: {word}" for name, node, word in said if word and not begins_well(node, word)]
    assert not odd, f"{module.path}: docstrings that begin with another word: {odd}"


def begins_well(node: ast.AST, word: str) -> bool:
    """Return whether the docstring of a module, class, property or function may begin with a word."""
    is_noun = word in ARTICLES | PLURALS or not (word in ODD or word in VERBS or word.removesuffix("s") in VERBS)
    if isinstance(node, ast.ClassDef):
        return is_noun
    decorators = getattr(node, "decorator_list", [])
    return word in VERBS or (is_noun and any(ast.unparse(one).endswith("property") for one in decorators))


def public(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Public functions and classes, and the public methods of public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                continue
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


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


def test_layers_are_told_apart() -> None:
    assert all(not set(low) & set(high) for low, high in pairwise(LAYERS))
    assert (
        layer_of("formats.torchfile.inert_pickle")
        < layer_of("formats.torchfile.read_archive")
        < layer_of("formats.dcp.format")
        < layer_of("formats")
    )


def test_public_names_are_no_modules() -> None:
    """A module that was imported would stand in the place of the function of its name."""
    assert not set(ckptkit.__all__) & MODULES.keys()
