"""Subjects: the programs that are tried, how each is called, and what can be read from what it made.

Outputs are read by torch and safetensors alone.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.faults.originals import ANYTHING, bits
from tests.faults.run_trees import MAKERS, OWN_NAMES
from tests.faults.server import Ended

Leaves = dict[str, Any]  # tensors and other values by flat key
_SHARDED = frozenset({"dcp", "training"})
_SAFETENSORS = frozenset({"hf", "indexed", "shards"})
_ABOVE = re.compile(r"(?:app|model_state)\.")  # what some trainers have above the model


@dataclass(frozen=True, slots=True)
class Subject:
    """A program: which originals it takes, how it is called from SRC to OUT, and how what it made is held to the truth.

    `read` gives what is in OUT, or what was said. `sees` gives what of a truth should be there.
    """

    name: str
    takes: frozenset[str]
    target: str
    arguments: Callable[[Path, Path], list[str]]
    read: Callable[[Path, Ended], Leaves]
    sees: Callable[[Mapping[str, Any]], Leaves] = dict
    makes: bool = field(default=True)

    @property
    def is_ours(self) -> bool:
        """True for ckptkit's own."""
        return self.target == "ckptkit"


def are_equal(found: Leaves, expected: Leaves) -> bool:
    """True if keys, dtypes, shapes and every bit are the same, and values that are no tensors equal.

    Entries below one that may be `ANYTHING` may be anything too.
    """
    above = [f"{key}." for key, value in expected.items() if value is ANYTHING]
    found = {
        name if name in expected else next((key[:-1] for key in above if name.startswith(key)), name): value
        for name, value in found.items()
    }
    return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())


def same(one: Any, other: Any) -> bool:
    """True for equal bits, or equal values."""
    if other is ANYTHING:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return bits(one) == bits(other)
    return type(one) is type(other) and bool(one == other)


def leaves(tree: object, prefix: str = "") -> Leaves:
    """What is in nested dicts and lists, by dotted keys."""
    if isinstance(tree, Mapping):
        pairs = list(tree.items())
    elif isinstance(tree, list) and any(isinstance(member, (Tensor, Mapping)) for member in tree):
        pairs = list(enumerate(tree))
    else:
        return {prefix: tree}
    return {
        name: leaf
        for key, branch in pairs
        for name, leaf in leaves(branch, f"{prefix}.{key}" if prefix else str(key)).items()
    }


# -- reading -----------------------------------------------------------------------------------------------------------


def read_torch_save(out: Path, _: Ended) -> Leaves:
    """A file of torch.save, or every `state.pt` in a directory; what is unsafe in it comes out as some object."""
    files = sorted(out.rglob("state.pt")) if out.is_dir() else [out]
    if not files:
        raise FileNotFoundError(out / "state.pt")
    return {name: leaf for file in files for name, leaf in read_one_file(file).items()}


def read_one_file(file: Path) -> Leaves:
    """What is in a file of torch.save."""
    try:
        return leaves(torch.load(file))
    except pickle.UnpicklingError:
        return leaves(torch.load(file, weights_only=False, pickle_module=inert))


_VALUES = frozenset(  # what values of plain types are made by
    {
        ("collections", "OrderedDict"),
        ("__builtin__", "complex"),
        ("__builtin__", "set"),
        ("_codecs", "encode"),
    }
)


class inert:  # noqa: N801 - torch takes a module
    """A `pickle` by which nothing is called but what makes tensors."""

    class Unpickler(pickle.Unpickler):
        """Finds torch's own functions, and a class that does nothing in place of all others."""

        def find_class(self, module: str, name: str) -> Any:
            is_safe = module.partition(".")[0] == "torch" or (module, name) in _VALUES
            return super().find_class(module, name) if is_safe and "." not in name else Nothing

    load = pickle.load
    UnpicklingError = pickle.UnpicklingError


class Nothing:
    """Takes whatever it is given, and does nothing with it."""

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, *_: object) -> None:
        """Do nothing."""


def read_safetensors(out: Path, _: Ended) -> Leaves:
    """All safetensors files of a directory; two files with one tensor are an error."""
    found: Leaves = {}
    for path in sorted(out.glob("*.safetensors")):
        more = load_file(path)
        if found.keys() & more.keys():
            raise ValueError(f"{path}: tensors that another file has")
        found |= more
    index = out / "model.safetensors.index.json"
    if index.exists() and json.loads(index.read_text())["weight_map"].keys() != found.keys():
        raise ValueError(f"{index}: other tensors than those of the files")
    return found


def read_dcp(out: Path, _: Ended) -> Leaves:
    """All DCP directories below `out`, as one checkpoint. Raises `ValueError` without any."""
    places = sorted(path.parent for path in out.rglob(".metadata"))
    if not places:
        raise ValueError("no .metadata")
    return dict(leaf for place in places for leaf in read_one_dcp(place).items())


def read_one_dcp(out: Path) -> Leaves:
    """A DCP directory: tensors by `dcp.load`, other values by their own archive; of those that are unsafe the bytes."""
    metadata = FileSystemReader(out).read_metadata()
    loaded: Leaves = {
        name: torch.zeros(entry.size.numel() * entry.properties.dtype.itemsize, dtype=torch.uint8)
        .view(entry.properties.dtype)
        .reshape(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=out, no_dist=True)
    for index, place in metadata.storage_data.items():
        if index.fqn not in loaded:
            content = (out / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            loaded[index.fqn] = read_value(content)
    return loaded


def read_value(content: bytes) -> Any:
    """The value in an archive of torch.save; the archive itself, if its value is not safe to make."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError:
        return content


def read_inspection(_: Path, ended: Ended) -> Leaves:
    """What `inspect --chunks --json` said of each tensor: dtype and shape, and how many elements its chunks have."""
    return {
        tensor["name"]: (tensor["dtype"], tuple(tensor["shape"]), sum(map(elements, tensor["chunks"])))
        for tensor in json.loads(ended.out)["tensors"]
    }


def elements(chunk: Mapping[str, Any]) -> int:
    """How many a chunk has."""
    return torch.Size(chunk["size"]).numel()


def read_nothing(_: Path, __: Ended) -> Leaves:
    """For what only answers yes or no: yes, it is sound."""
    return {}


# -- what should be there ----------------------------------------------------------------------------------------------


def weights_of(truth: Mapping[str, Any]) -> Leaves:
    """The model's tensors by its own names."""
    found = {_ABOVE.sub("", name): value for name, value in truth.items() if isinstance(value, Tensor)}
    return {
        name.removeprefix("model."): value for name, value in found.items() if not name.startswith(("optim", "extra."))
    }


def specs_of(truth: Mapping[str, Any]) -> Leaves:
    """Of each tensor what `inspect` says."""
    return {
        name: (str(value.dtype).removeprefix("torch."), tuple(value.shape), value.numel())
        for name, value in truth.items()
        if isinstance(value, Tensor)
    }


def nothing_of(_: Mapping[str, Any]) -> Leaves:
    """Nothing."""
    return {}


def model_of(truth: Mapping[str, Any]) -> Leaves:
    """The model's tensors under `model`."""
    return {f"model.{name}": value for name, value in weights_of(truth).items()}


# -- the lists ---------------------------------------------------------------------------------------------------------


def command(*words: str) -> Callable[[Path, Path], list[str]]:
    """The arguments of a command of ckptkit's, in which SRC and OUT stand for the paths."""
    return lambda src, out: [{"SRC": str(src), "OUT": str(out)}.get(word, word) for word in words]


def paths(src: Path, out: Path) -> list[str]:
    """The arguments of a peer."""
    return [str(src), str(out)]


_ALL = _SHARDED | _SAFETENSORS | {"pt", *MAKERS}
_MODELS = _ALL - OWN_NAMES
_OWN_FORMAT = frozenset({"ranks", "universal", "automodel", "skyrl"})  # which is written for another number of ranks
CONSOLIDATE = Subject(
    *("ckptkit consolidate", _MODELS, "ckptkit", command("consolidate", "SRC", "OUT", "--no-sync")),
    read_safetensors,
    weights_of,
)
RESHARD = Subject(
    *("ckptkit reshard", _ALL - _OWN_FORMAT, "ckptkit"),
    command("reshard", "SRC", "OUT", "--to", "3", "--no-sync"),
    read_dcp,
)
CONVERT = Subject(
    *("ckptkit convert", _ALL, "ckptkit", command("convert", "SRC", "OUT", "--to", "pt", "--no-sync")),
    read_torch_save,
)
AVERAGE = Subject(
    *("ckptkit average", _MODELS, "ckptkit", command("average", "SRC", "SRC", "OUT", "--no-sync")),
    read_safetensors,
    weights_of,
)
INSPECT = Subject(
    *("ckptkit inspect", _ALL, "ckptkit", command("inspect", "SRC", "--chunks", "--json")),
    read_inspection,
    specs_of,
    makes=False,
)
VERIFY = Subject(
    *("ckptkit verify", _ALL, "ckptkit", command("verify", "SRC", "--json")),
    read_nothing,
    nothing_of,
    makes=False,
)
OURS = (CONSOLIDATE, RESHARD, CONVERT, AVERAGE, INSPECT, VERIFY)

_PEERS = "tests.faults.peers"
TO_TORCH_SAVE = Subject("torch dcp_to_torch_save", _SHARDED, f"{_PEERS}:to_torch_save", paths, read_torch_save)
PEERS = (
    TO_TORCH_SAVE,
    Subject("torch dcp.load", _SHARDED, f"{_PEERS}:load", paths, read_torch_save, model_of),
    Subject("torch consolidate", frozenset({"shards"}), f"{_PEERS}:consolidate", paths, read_safetensors, weights_of),
    Subject("torch HF reader", _SAFETENSORS, f"{_PEERS}:load_safetensors", paths, read_torch_save, model_of),
    Subject("torch torch_save_to_dcp", frozenset({"pt"}), f"{_PEERS}:to_dcp", paths, read_dcp),
    Subject("accelerate merge", frozenset({"dcp"}), f"{_PEERS}:merge", paths, read_safetensors, weights_of),
)
