"""Checkpoints that old and new versions of torch and of trainers have written once, and the values in them.

Each NAME.tar.xz is a checkpoint. NAME.json says how it was made and what must come out of it. No file here is ever
written again: whoever adds one runs `make.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptkit
from ckptkit.formats.archives.non_tensor_entries import load_value
from tests.corpus.make import describe, flat

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
VERSION = re.compile(r"-(\d+)\.(\d+)\.(\d+)-")  # in LIBRARY-VERSION-KIND
NAMES = sorted(
    (path.stem for path in HERE.glob("*.json")), key=lambda name: [int(number) for number in VERSION.split(name)[1:4]]
)
NEWEST = {VERSION.sub(" ", name): name for name in NAMES}
PROGRAMS = {"make.py", "test_corpus.py"}


@dataclass(frozen=True)
class Stored:
    """A checkpoint, unpacked, and what must come out of it."""

    root: Path
    facts: Mapping[str, Any]

    @property
    def tensors(self) -> dict[str, str]:
        """The dtype, shape and SHA-256 of each tensor, as `describe` gives them."""
        return dict(self.facts["tensors"])


@pytest.fixture(params=NAMES, scope="module")
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    root = tmp_path_factory.mktemp(request.param)
    with tarfile.open(HERE / f"{request.param}.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return Stored(root, json.loads((HERE / f"{request.param}.json").read_text()))


once_per_kind = pytest.mark.parametrize("stored", NEWEST.values(), indirect=True)


def read(path: Path) -> dict[str, str]:
    return {name: describe(lazy.torch()) for name, lazy in ckptkit.open(path).items()}


def load(path: Path) -> dict[str, str]:
    """What torch itself loads from all DCP directories at `path`."""
    found: dict[str, str] = {}
    for file in path.rglob(".metadata"):
        reader = FileSystemReader(file.parent)
        known = reader.read_metadata().state_dict_metadata
        tensors = {name: one for name, one in known.items() if isinstance(one, TensorStorageMetadata)}
        state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in tensors.items()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        found |= {name: describe(tensor) for name, tensor in state.items()}
    return found


def entries(path: Path) -> dict[str, Any]:
    """The entries that are not tensors, with lists for tuples as JSON has them.

    Before 2.4, torch stored a dict without tensors as one entry.
    """
    layout = ckptkit.open_layout(path)
    values = {name: load_value(layout.root, blob) for name, blob in layout.blobs.items()}
    return json.loads(json.dumps(dict(leaf for name in values for leaf in flat(values[name], name)), default=str))


def naming(stored: Stored) -> dict[str, Any]:
    """The options by which an optimizer gets names; transformers' Trainer does not store the order."""
    if stored.facts["optimizer_keys"] != "ids":
        return {}
    return {"optimizer_order": "model"} if "Trainer" in stored.facts["trainer"] else {"optimizer_keys": "names"}


def assert_holds(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """A checkpoint may hold more, such as random states, but all that is expected."""
    assert {name: found.get(name) for name in expected} == expected


def test_inspect_says_what_it_is(stored: Stored) -> None:
    found = ckptkit.inspect(stored.root)
    facts = {key: stored.facts[key] for key in ("format", "trainer", "step", "world_size", "optimizer_keys")}
    assert facts == {
        "format": found.layout.format,
        "trainer": found.trainer,
        "step": found.step,
        "world_size": found.world_size,
        "optimizer_keys": found.optimizer_keys,
    }


def test_verify_finds_nothing(stored: Stored) -> None:
    assert [problem for part in ckptkit.verify(stored.root) for problem in part.problems] == []


def test_every_value_is_as_it_was_written(stored: Stored, tmp_path: Path) -> None:
    """Where the optimizer numbers its parameters, it gets names first."""
    root = stored.root
    if stored.facts["optimizer_keys"] == "ids":
        root = tmp_path / "named"
        ckptkit.convert(stored.root, root, to="dcp", **naming(stored))
    assert_holds(read(root), stored.tensors)
    assert_holds(entries(root), stored.facts["entries"])


@once_per_kind
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is in a single process
def test_torch_loads_it_resharded(stored: Stored, tmp_path: Path) -> None:
    ckptkit.convert(stored.root, tmp_path / "dcp", to="dcp", world_size=3, **naming(stored))
    assert_holds(load(tmp_path / "dcp"), stored.tensors)
    assert_holds(entries(tmp_path / "dcp"), stored.facts["entries"])


@once_per_kind
def test_the_model_is_consolidated(stored: Stored, tmp_path: Path) -> None:
    ckptkit.consolidate(stored.root, tmp_path / "model", names="keep")
    found = read(tmp_path / "model")
    own = {name: value for name, value in stored.tensors.items() if not name.startswith(("optim", "extra"))}
    unwrapped = [{name.removeprefix(key): own[name] for name in own} for key in ("", "model.", "state_dict.")]
    assert any(found.items() <= weights.items() for weights in unwrapped)
    assert set(found.values()) == set(own.values())  # of tied weights one name may do


def test_no_file_is_changed_or_unlisted() -> None:
    """The files are small, and those that `MANIFEST` lists; a change to one is a change to that list as well."""
    lines = (HERE / "MANIFEST").read_text().splitlines()
    listed = {name: sum_ for sum_, name in (line.split("  ") for line in lines)}
    files = [path for path in HERE.iterdir() if path.is_file() and path.name not in PROGRAMS | {"MANIFEST"}]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} == listed
    assert sum(path.stat().st_size for path in files) < 2e6


def test_the_documentation_lists_the_versions() -> None:
    """For each kind of checkpoint, in docs/trainers.md."""
    versions: dict[str, list[str]] = {}
    for name in NAMES:
        library, *numbers, kind = VERSION.split(name)
        versions.setdefault(f"{library}, `{kind}`", []).append(".".join(numbers))
    rows = [f"| {kind} | {', '.join(found)} |" for kind, found in sorted(versions.items())]
    table = "\n".join(["| library, kind in `make.py` | versions |", "|---|---|", *rows])
    assert f"<!-- corpus -->\n\n{table}\n\n<!-- end of corpus -->" in (DOCS / "trainers.md").read_text()
