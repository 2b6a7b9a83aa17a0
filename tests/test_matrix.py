"""Every reader against every writer: what torch and safetensors load afterwards is what went in, to the last bit.

A format added to `FORMATS` is in the matrix by itself, unless it is a trainer's; it needs an oracle here, which is its
owner's own loader.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.conversion.convert import convert
from ckptkit.errors import Unsupported
from ckptkit.formats import FORMATS, FormatWriter, get_format, get_writer, locate_all_chunks, writable_formats
from ckptkit.io.origin import Origin
from ckptkit.layout import Layout, Spec, StoredTensor, WriterOptions
from ckptkit.layout.dtypes import DTYPES
from ckptkit.state.draft import Conversion, Draft
from ckptkit.state.options import ConvertOptions
from ckptkit.state.write_output import write_output
from tests import producers
from tests.conftest import Produce, Produced
from tests.formats.contract import raw_bytes
from tests.producers import Producer, Truth, counted
from tests.raw import Files, Numbers, contents
from tests.strategies import shapes, tilings
from tests.tiers import pairs

# of trainers, which hold a model with its optimizer; their own tests have their judges
OF_TRAINERS = ("universal", "ranks", "torch_checkpointing")
WRITERS = tuple(name for name in writable_formats() if name not in OF_TRAINERS)
NESTING = ("dcp", "pt")  # formats that hold key paths, and what is no tensor
Leaves = dict[tuple[str, ...], Any]  # what a nested state holds, by the way to it

# -- oracles -----------------------------------------------------------------------------------------------------------


def load_dcp(root: Path) -> Any:
    """A DCP directory as torch unflattens it."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        _load_state_dict(state, FileSystemReader(root), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def load_hf(root: Path) -> Any:
    """The tensors of a directory's safetensors files."""
    return {name: tensor for file in root.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load_pt(root: Path) -> Any:
    """What torch.save put into `state.pt`."""
    return torch.load(root / "state.pt", weights_only=True)


ORACLES: dict[str, Callable[[Path], Any]] = {"dcp": load_dcp, "hf": load_hf, "pt": load_pt}


def leaves(tree: Any, way: tuple[str, ...] = ()) -> Leaves:
    """What lies in nested dicts and lists, which formats spell differently; empty ones hold nothing."""
    if not isinstance(tree, Mapping | list):
        return {way: tree}
    branches = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {step: leaf for key, branch in branches for step, leaf in leaves(branch, (*way, str(key))).items()}


def assert_same(found: Leaves, expected: Leaves) -> None:
    assert found.keys() == expected.keys()
    for way, leaf in expected.items():
        if isinstance(leaf, Tensor):
            assert (found[way].dtype, found[way].shape) == (leaf.dtype, leaf.shape), way
            assert raw_bytes(found[way]) == raw_bytes(leaf), way
        else:
            assert (type(found[way]), found[way]) == (type(leaf), leaf), way


# -- sources -----------------------------------------------------------------------------------------------------------


def single_file(root: Path) -> Truth:
    """One safetensors file, with names in need of an order."""
    state = {f"layers.{i}.weight": counted(i, 3) + i for i in range(11)} | {"count": torch.tensor(3)}
    root.mkdir()
    save_file(state, root / "model.safetensors", {"format": "pt"})
    return state


def nested() -> tuple[dict[str, Any], Truth]:
    """A state of nested dicts and lists with views into shared storages, ties and all that is no tensor."""
    shared = counted(6, 4)
    state = {
        "model": {"a.b": shared[2:5], "turned": shared.t(), "tied": shared, "empty": counted(0, 3)},
        "seeds": [counted(5, dtype=torch.uint8), counted(4, dtype=torch.uint8)],
        "optim": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "step": 7,
        "nothing": None,
        "note": "ü\n",
    }
    truth = {".".join(way): leaf for way, leaf in leaves(state).items() if isinstance(leaf, Tensor)}
    return state, {name: tensor.clone() for name, tensor in truth.items()}


def torch_save(root: Path) -> Truth:
    """A nested state in one file of torch.save."""
    state, truth = nested()
    root.mkdir()
    torch.save(state, root / "state.pt")
    return truth


def torch_save_legacy(root: Path) -> Truth:
    """The same as torch wrote it before version 1.6."""
    state, truth = nested()
    root.mkdir()
    torch.save(state, root / "state.pt", _use_new_zipfile_serialization=False)
    return truth


SOURCES: tuple[Producer, ...] = (
    *(producers.fsdp2, producers.hsdp, producers.fsdp1, producers.mesh, producers.tensor_parallel),
    *(producers.many_files, producers.file_per_item, producers.no_collectives, producers.leftovers, producers.no_crc),
    *(producers.dtypes, producers.strided, producers.nothing, producers.strange_names),
    *(producers.under_state_model, producers.under_app),
    *(producers.full, torch_save, torch_save_legacy),
    *(producers.hf_shards, producers.hf_shards_in_parts, producers.hf_shards_deduplicated),
    *(producers.hf_alone, single_file),
)
UNHOLDABLE: dict[tuple[Producer, str], str] = {(producers.dtypes, "hf"): "complex128"}
OPTIONS = (WriterOptions(1 << 40), WriterOptions(150, world_size=3))
# what is no tensor in sources that their own library does not load whole
HELD_BESIDE: dict[Producer, Leaves] = {
    producers.no_collectives: {("step",): 7},
    producers.hf_shards: {},
    producers.hf_shards_in_parts: {},
    producers.hf_shards_deduplicated: {},
}


def state_of(made: Produced, producer: Producer) -> Leaves:
    """What a source holds: the tensors of its truth, and the rest as its own library loads it."""
    layout = open_layout(made.root)
    held = HELD_BESIDE[producer] if producer in HELD_BESIDE else leaves(ORACLES[layout.format](made.root))
    others = {way: leaf for way, leaf in held.items() if not isinstance(leaf, Tensor)}
    return others | {tuple(map(str, layout.key(name))): tensor for name, tensor in made.truth.items()}


def as_held(state: Leaves, form: str) -> Leaves:
    """As much of a state as a format holds, under the names that it can give."""
    if form in NESTING:
        return state
    return {(".".join(way),): leaf for way, leaf in state.items() if isinstance(leaf, Tensor)}


def test_the_table_says_which_formats_are_written() -> None:
    assert tuple(name for name in FORMATS if isinstance(get_format(name), FormatWriter)) == writable_formats()


def spell(value: Producer | str) -> str:
    return value if isinstance(value, str) else value.__name__


# -- the matrix --------------------------------------------------------------------------------------------------------


def write_as(form: str, wanted: Layout, root: Path, options: WriterOptions) -> Layout:
    """A checkpoint of all that is in a layout, of which every byte is found."""
    writer = get_writer(form)
    asked = ConvertOptions(to=form, max_shard_size=options.max_shard_size, sync=False, jobs=2)
    draft = Draft.of([wanted], asked, options.world_size)
    write_output(Conversion(origins=[Origin.of(wanted.root)], output=root, options=asked, drafts=[draft]))
    return locate_all_chunks(writer.read(root))


@pytest.mark.parametrize(("producer", "form"), pairs(SOURCES, WRITERS), ids=spell)
def test_every_reader_with_every_writer(produce: Produce, tmp_path: Path, producer: Producer, form: str) -> None:
    made = produce(producer)
    source = locate_all_chunks(open_layout(made.root))
    if (what := UNHOLDABLE.get((producer, form))) is not None:
        with pytest.raises(Unsupported, match=what):
            write_as(form, source, tmp_path / "out", WriterOptions(1 << 40))
        return
    expected = as_held(state_of(made, producer), form)
    for i, options in enumerate(OPTIONS):
        write_as(form, source, tmp_path / str(i), options)
        assert_same(leaves(ORACLES[form](tmp_path / str(i))), expected)


@pytest.mark.parametrize(("producer", "form"), pairs(SOURCES, NESTING), ids=spell)
def test_what_convert_keeps(produce: Produce, tmp_path: Path, producer: Producer, form: str) -> None:
    made = produce(producer)
    convert(made.root, tmp_path / "out", to=form, sync=False)
    assert_same(leaves(ORACLES[form](tmp_path / "out")), state_of(made, producer))


@pytest.mark.parametrize(
    ("producer", "first"), pairs([producers.fsdp2, torch_save, producers.hf_shards], WRITERS), ids=spell
)
def test_what_was_written_is_read_again(produce: Produce, tmp_path: Path, producer: Producer, first: str) -> None:
    made = produce(producer)
    expected = as_held(state_of(made, producer), first)
    once = write_as(
        first, locate_all_chunks(open_layout(made.root)), tmp_path / "once", WriterOptions(150, world_size=3)
    )
    for form, (i, options) in product(WRITERS, enumerate(OPTIONS)):
        out = tmp_path / f"{form}-{i}"
        write_as(form, once, out, options)
        assert_same(leaves(ORACLES[form](out)), as_held(expected, form))


@pytest.mark.parametrize("form", WRITERS)
@given(data=st.data())
def test_any_chunks_through_every_writer(form: str, data: st.DataObject) -> None:
    numbers: dict[str, Numbers] = {}
    stored: dict[str, StoredTensor] = {}
    with tempfile.TemporaryDirectory() as home:
        files = Files(Path(home, "src"))
        for name in ("a", "b.0", "b.1"):
            dtype = DTYPES[data.draw(st.sampled_from(("float32", "bfloat16", "int64", "bool", "float8_e5m2")))]
            shape = data.draw(shapes)
            most = 2 if dtype.kind == "bool" else 256
            raw = np.random.default_rng(len(numbers)).integers(0, most, (*shape, dtype.itemsize), np.uint8)
            numbers[name] = raw.view(f"V{dtype.itemsize}").reshape(shape)
            orders = st.none() | st.permutations(range(len(shape)))
            boxes = data.draw(tilings(shape))
            chunks = [files.put(numbers[name], box, dtype, order=data.draw(orders)) for box in boxes]
            stored[name] = StoredTensor(Spec(dtype, shape), tuple(chunks))
        options = WriterOptions(data.draw(st.integers(1, 200)), world_size=data.draw(st.integers(1, 6)))
        made = write_as(form, files.layout(**stored), Path(home, "dst"), options)
        assert made.specs == {name: tensor.spec for name, tensor in stored.items()}
        for name in stored:
            assert contents(made, name) == numbers[name].tobytes()
        held = leaves(ORACLES[form](made.root))
        assert {".".join(way): raw_bytes(leaf) for way, leaf in held.items()} == {
            name: array.tobytes() for name, array in numbers.items()
        }
