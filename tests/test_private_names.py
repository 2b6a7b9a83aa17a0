"""Every private name of another library that ckptkit uses is in CONTRIBUTING.md, and the installed version has it."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlanner, state_dict_loader
from torch.distributed.checkpoint import state_dict_saver as saver

from ckptkit.storage import Reader
from ckptkit.training.saving.run import torch_warnings_ignored
from tests.source import PACKAGE, PATHS, nodes

PAGE = PACKAGE.parent / "CONTRIBUTING.md"
# Of these libraries a module counts as private as well if its documentation leaves it out. Torch says itself that a
# name is public unless it or its module begins with an underscore.
DOCUMENTED = {
    *("transformers", "transformers.utils", "transformers.utils.logging"),
    *("huggingface_hub", "huggingface_hub.errors", "huggingface_hub.utils", "huggingface_hub.utils.tqdm"),
    *("typer", "safetensors", "safetensors.torch", "fsspec", "s3fs", "obstore", "obstore.exceptions", "obstore.store"),
}
LIBRARIES = {module.partition(".")[0] for module in DOCUMENTED} | {"click", "aiobotocore", "botocore"}
OF_NAMEDTUPLES = {"_replace", "_asdict", "_fields"}
ROW = re.compile(r"\| `(?P<name>[\w.]+)` \| (?P<files>[^|]+) \| (?P<why>[^|]+) \| `(?P<test>[\w/.]+)` \|")

Use = tuple[str, str]  # the last part of a name, and the file in ckptkit that has it


class Row:
    """A row of the table: a private name, the files that use it, and a test of what they use it for."""

    def __init__(self, match: re.Match[str]) -> None:
        self.name = match["name"]
        self.files = re.findall(r"`([\w/.]+)`", match["files"])
        self.test = match["test"]
        self.last = self.name.rpartition(".")[2]

    def uses(self) -> set[Use]:
        return {(self.last, file) for file in self.files}


ROWS = [Row(match) for match in ROW.finditer(PAGE.read_text())]


SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in PATHS}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def imports(path: Path) -> Iterator[str]:
    """The dotted names that a module imports."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def own_names(path: Path) -> set[str]:
    """The names that a module defines itself, as functions, classes, variables or attributes."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    return found


def attributes(path: Path) -> Iterator[tuple[str, str]]:
    """The attributes that a module uses, also by `getattr`, each with the variable that has it, or ""."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.value.id if isinstance(node.value, ast.Name) else ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            yield from ((str(one.value), "") for one in node.args if isinstance(one, ast.Constant))


def private_uses() -> set[Use]:
    """The uses of other libraries' private names, found by their looks."""
    found = set()
    ours = set().union(*map(own_names, PATHS))
    for file, path in SOURCES.items():
        for name in imports(path):
            module, _, last = name.rpartition(".")
            library = name.partition(".")[0]
            if library in {"ckptkit", "__future__", *sys.stdlib_module_names}:
                continue
            if is_private(name) or (library in LIBRARIES and {name, module}.isdisjoint(DOCUMENTED)):
                found.add((last, file))
        mine = own_names(path)
        for attribute, owner in attributes(path):
            known = ours if owner in ("self", "cls") else mine
            is_known = attribute in OF_NAMEDTUPLES or attribute in known or owner in sys.stdlib_module_names
            if is_private(attribute) and not is_known:
                found.add((attribute, file))
    return found


def listed_uses() -> set[Use]:
    """The uses of names in the table, private by their looks or not: where they are imported, else as attributes."""
    imported = {(name, file) for file, path in SOURCES.items() for name in imports(path)}
    used = {(name, file) for file, path in SOURCES.items() for name, _ in attributes(path)}
    by_import = {name for name, _ in imported}
    return {
        (row.last, file)
        for row in ROWS
        for file in SOURCES
        if ((row.name, file) in imported if row.name in by_import else (row.last, file) in used)
    }


def test_the_table_has_every_private_name_and_where_it_is_used() -> None:
    assert sorted(private_uses() | listed_uses()) == sorted(use for row in ROWS for use in row.uses())


def resolve(name: str) -> Any:
    """What a dotted name stands for; an attribute of instances is looked up in one that is made without arguments."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part) if hasattr(found, part) else getattr(found(), part)
        return found
    raise AssertionError(f"there is no library of {name}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_installed_version_has_the_name(row: Row) -> None:
    pytest.importorskip(row.name.partition(".")[0])
    resolve(row.name)
    assert (PACKAGE.parent / row.test).is_file()


def save(path: Path, state: dict[str, Any], **options: bool) -> None:
    with torch_warnings_ignored():
        planner = DefaultSavePlanner(**options)
        saver.save(state, storage_writer=FileSystemWriter(path), planner=planner, no_dist=True)


def test_torch_plans_a_load_by_the_function_that_reader_knows(tmp_path: Path) -> None:
    save(tmp_path, {"there": torch.ones(2)})
    state = {"there": torch.zeros(2), "missing": torch.zeros(2)}
    with torch_warnings_ignored(), pytest.warns(UserWarning, match="not in the checkpoint, and unchanged: `missing`"):
        state_dict_loader.load(state, storage_reader=Reader(tmp_path, missing="keep"), no_dist=True)
    assert [tensor.tolist() for tensor in state.values()] == [[1, 1], [0, 0]]


def test_torch_caches_plans_where_a_writer_looks_for_them(tmp_path: Path) -> None:
    save(tmp_path, {"there": torch.ones(2)}, enable_plan_caching=True)
    plans = [plans for plans in SavePlanner._cached_global_plan.values() if len(plans) == 1]
    assert [item.index.fqn for item in plans[0][0].items] == ["there"]
