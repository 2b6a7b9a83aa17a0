"""Parsers: everything of ckptkit's that makes sense of bytes that others wrote, each as a function of bytes alone.

A parser is total: of whatever bytes it makes a value, or raises `CkptError`, in bounded memory and time.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ckptkit import trainers
from ckptkit.checkpoints import manifest
from ckptkit.engine.ledger import Journal, Ledger
from ckptkit.errors import CkptError
from ckptkit.formats import require_known_format
from ckptkit.formats.archives import torch_save, zip_entries
from ckptkit.formats.archives.flatten import flatten, unflatten
from ckptkit.formats.archives.torch_save import StateFile
from ckptkit.formats.dcp.format import Dcp
from ckptkit.formats.hf import HuggingFace
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pt import Pt
from ckptkit.models import architectures, companions
from ckptkit.plugins.deepspeed.experts import ExpertFiles, find_expert_files
from ckptkit.plugins.deepspeed.file_names import DeepSpeedFiles
from ckptkit.plugins.deepspeed.join_partitions import join_zero_parameters
from ckptkit.plugins.deepspeed.model_states import read_model_states
from ckptkit.plugins.deepspeed.read_partitions import read_partition
from ckptkit.plugins.deepspeed.unpartitioned import Gathering, put_unpartitioned_states
from ckptkit.runs import retention
from tests.faults.zips import be_archive

Seeds = Callable[[], list[bytes]]


@dataclass(frozen=True, slots=True)
class Parser:
    """A parser that may write to the directory it is given; sound input, and what it once stumbled on.

    What lies `beside` its input is to be in the directory already, or all of the original that it is `within`.
    """

    name: str
    parse: Callable[[bytes, Path], object]
    seeds: Seeds
    found: tuple[bytes, ...] = ()
    beside: tuple[str, ...] = ()
    within: str = ""

    def lay(self, place: Path) -> None:
        """Put what lies beside its input into a directory."""
        if self.within:
            shutil.copytree(root_of(self.within), place, dirs_exist_ok=True)
        for name in self.beside:
            (place / name).write_bytes(files()[name])


def is_total(parser: Parser, data: bytes, place: Path) -> None:
    """Parse; anything but a value or a `CkptError` comes out of here."""
    try:
        parser.parse(data, place)
    except CkptError as error:
        str(error)


# -- bytes -------------------------------------------------------------------------------------------------------------


def reading(data: bytes) -> zip_entries.ReadAt:
    """Reads in `data`, as in a file: what lies past its end is an error of ours."""
    return lambda offset, length: data[offset : offset + length]


def parse_pickle(data: bytes, _: Path) -> object:
    """A pickle in which any name may occur, and all that is in it."""
    value, _end = inert_pickle.load(data, inert_pickle.ANY_NAME)
    return sum(1 for _ in inert_pickle.walk_members(value))


def parse_archive(data: bytes, _: Path) -> object:
    """An archive with one tensor."""
    return zip_entries.locate_single_tensor(reading(data), len(data))


def parse_contents(data: bytes, _: Path) -> object:
    """An archive of whatever."""
    zip_entries.verify_archive_in_memory(data)
    return None


def parse_legacy(data: bytes, _: Path) -> object:
    """A file of torch.save as it was before archives."""
    state, entries = torch_save.read_legacy_torch_save(reading(data), len(data))
    return flatten(state, entries, "state.pt")


def parse_state(data: bytes, _: Path) -> object:
    """The pickle of a state dict, taken apart and put together again."""
    state, _end = inert_pickle.load(data, inert_pickle.ANY_NAME)
    storages = {f"data/{i}": zip_entries.ZipEntry(64 * i, 1 << 20, 0) for i in range(16)}
    flat = flatten(state, {"data.pkl": zip_entries.ZipEntry(0, len(data), 0), **storages}, "state.pt")
    return unflatten((*flat.tensors, *flat.blobs), flat.keys.__getitem__, lambda name: name)


def as_file(data: bytes) -> StateFile:
    """A file of torch.save with a pickle, and storages as large as may be asked for."""
    value, _end = inert_pickle.load(data, inert_pickle.ANY_NAME)
    storages = {f"data/{i}": zip_entries.ZipEntry(64 * i, 1 << 20, 0) for i in range(16)}
    return StateFile("file.pt", value, {"data.pkl": zip_entries.ZipEntry(0, len(data), 0), **storages})


EXPERTS = "deepspeed_moe.experts.deepspeed_experts."  # what their names begin with


def parse_partition(data: bytes, place: Path) -> object:
    """What a rank of ZeRO has of the optimizer, and the parameters in it."""
    partition = read_partition(as_file(data))
    is_of_experts = any(group.get("moe") for group in partition.settings)
    above = f"{EXPERTS}0." if is_of_experts else ""
    shapes = [{f"{above}up": (3, 4), f"{above}bias": (4,)}] * len(partition.groups)
    experts = ExpertFiles((), {EXPERTS: 1}, None) if is_of_experts else None
    return list(join_zero_parameters(shapes, [partition], experts, place))


def parse_model_states(data: bytes, _: Path) -> object:
    """Model states of DeepSpeed, with or without ZeRO."""
    model = read_model_states(as_file(data))
    put_unpartitioned_states(Gathering(), model)
    find_expert_files(Path(), DeepSpeedFiles(), model)
    return model


def in_file(name: str, parse: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """A parser of a directory in which one file has these bytes."""

    def parse_file(data: bytes, place: Path) -> object:
        (place / name).write_bytes(data)
        return parse(place)

    return parse_file


def pickled_in(name: str) -> Callable[[bytes, Path], object]:
    """A parser of a directory with an archive in which this is pickled."""

    def parse_archive_with(data: bytes, place: Path) -> object:
        with zipfile.ZipFile(place / name) as archive:
            entries = {entry.filename.partition("/")[2]: archive.read(entry) for entry in archive.infolist()}
        (place / name).write_bytes(be_archive({**entries, "data.pkl": data}))
        return parse_all(place)

    return parse_archive_with


def parse_all(place: Path) -> object:
    """All that the ranks of a trainer have left in a directory."""
    return require_known_format(place).read(place)


def root_of(kind: str) -> Path:
    """Where a trainer's checkpoint lies that nothing is wrong with."""
    from tests.faults.originals import original

    return original(kind).root


def of_ranks(name: str, kind: str, file: str) -> Parser:
    """The parser of a file of a trainer's rank: of what is pickled in it, or of the file where it is no archive."""
    is_archive = file.endswith((".pt", ".pth"))
    parse = pickled_in(file) if is_archive else in_file(file, parse_all)

    def seeds() -> list[bytes]:
        content = (root_of(kind) / file).read_bytes()
        return [pickle_in(content) if is_archive else content]

    return Parser(name, parse, seeds, within=kind)


def parse_metadata(place: Path) -> object:
    """`.metadata` beside empty files of its ranks, however long they should be."""
    for rank in range(2):
        if not (place / f"__{rank}_0.distcp").exists():
            with (place / f"__{rank}_0.distcp").open("wb") as file:
                file.truncate(1 << 20)
    return Dcp().read(place)


def parse_config(place: Path) -> object:
    """`config.json`, the tensors that it calls for, and what would be written of it."""
    found = companions.find_companions_in(place)
    if found is None or found.config is None:
        return None
    architectures.has_tied_head(found.config)
    companions.with_weights_dtype(found.config, [])
    table = architectures.find_table(found.config)
    return table and (table.memory, table.disk)


def parse_journal(place: Path) -> object:
    """What an interrupted conversion has done."""
    return Journal(place / "journal.jsonl").units


def parse_name(data: bytes, _: Path) -> object:
    """The name of a checkpoint's directory."""
    return trainers.find_step_of_path(Path(data.decode("utf-8", "surrogateescape").replace("\0", "")))


# -- sound input -------------------------------------------------------------------------------------------------------


@cache
def files() -> Mapping[str, bytes]:
    """Files of sound checkpoints, as torch and safetensors write them, by what they are."""
    import torch

    from tests.faults.originals import original

    tensor, state = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(6.0).reshape(2, 3), tensor)
    torch.save({"model": {"a.b": torch.zeros(3)}, "step": 1, "lists": [{"lr": 0.1}, (1, 2)]}, state)
    old = io.BytesIO()
    torch.save({"a": torch.zeros(3), "n": [1]}, old, _use_new_zipfile_serialization=False)
    zero = {name: io.BytesIO() for name in states_of_zero()}
    for name, value in states_of_zero().items():
        torch.save(value, zero[name])
    return {
        **{name: file.getvalue() for name, file in zero.items()},
        "tensor": tensor.getvalue(),
        "state": state.getvalue(),
        "old": old.getvalue(),
        "metadata": (original("training").root / ".metadata").read_bytes(),
        "header": (original("hf").root / "model.safetensors").read_bytes(),
        **{path.name: path.read_bytes() for path in original("indexed").root.glob("*.safetensors")},
        "shard": (original("shards").root / "shard-00001-model-00001-of-00001.safetensors").read_bytes(),
        "index": (original("indexed").root / "model.safetensors.index.json").read_bytes(),
    }


def sound(*names: str) -> Seeds:
    """Some of them."""
    return lambda: [files()[name] for name in names]


def pickled() -> list[bytes]:
    """What is pickled in an archive."""
    found = [files()["metadata"], pickle.dumps({"a": [1, (2.5, None)], b"b": {"c"}}, 4)]
    for name in ("tensor", "state"):
        with zipfile.ZipFile(io.BytesIO(files()[name])) as opened:
            found += [opened.read(entry) for entry in opened.infolist() if entry.filename.endswith("data.pkl")]
    return found


def of_zero(*names: str) -> Seeds:
    """What is pickled in files like those of ZeRO."""
    return lambda: [pickle_in(files()[name]) for name in names]


def pickle_in(archive: bytes) -> bytes:
    """The pickle in an archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return next(opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))


def states_of_zero() -> dict[str, dict[str, Any]]:
    """Small states like those that ZeRO 2 and 3, and DeepSpeed without it, save."""
    import torch

    flat = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(16), "exp_avg_sq": torch.zeros(16)}
    group = {"lr": 0.1, "params": [0]}
    base = {"state": {0: flat}, "param_groups": [group]}
    second = {
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [torch.zeros(16)],
        "partition_count": [1],
    }
    third = {"optimizer_state_dict": base, "fp32_flat_groups": [torch.zeros(16)], "partition_count": 1}
    shapes = {"up": torch.Size([3, 4]), "bias": torch.Size([4])}
    module = {"up": torch.zeros(3, 4), "bias": torch.zeros(4)}
    states = {i: {"exp_avg": torch.zeros_like(value)} for i, value in enumerate(module.values())}
    torchs = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    alone = {"optimizer_state_dict": torchs, "fp32_groups": [list(module.values())]}
    of_experts = {"state": {0: flat}, "param_groups": [{**group, "moe": True, "name": "ep_size_1"}]}
    return {
        "experts": {"optimizer_state_dict": {**second, "base_optimizer_state": of_experts}},
        "zero2": {"optimizer_state_dict": {**second, "single_partition_of_fp32_groups": [torch.zeros(16)]}},
        "zero3": {"optimizer_state_dict": third},
        "model": {"module": module, "param_shapes": [shapes], "shared_params": {"a": "up"}, "buffer_names": []},
        "zero0": {
            "module": module,
            "optimizer": {"optimizer_state_dict": alone, "fp32_groups": [list(module.values())]},
        },
    }


def as_json(*values: Any) -> Seeds:
    """Values as JSON."""
    return lambda: [json.dumps(value).encode() for value in values]


_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
}
_DEEP = b"[" * 100_000
_LARGE = b"1" + b"0" * 400
_SUM = manifest.FileSum(10, 0x1234)
_UNIT = {"unit": 1, **Ledger().to_json()}

_CONFIGS = tuple(
    json.dumps(_CONFIG | change).encode()
    for change in (
        {"model_type": "\ud800"},
        {"num_hidden_layers": 1 << 69},
        {"hidden_size": float("inf")},
        {"head_dim": -1},
    )
)

PARSERS = (
    Parser("pickle", parse_pickle, pickled),
    Parser("archive", parse_archive, sound("tensor", "state")),
    Parser("entry", parse_contents, sound("tensor", "state")),
    Parser("old torch.save", parse_legacy, sound("old")),
    Parser("state dict", parse_state, pickled),
    Parser("torch.save file", in_file("state.pt", Pt().read), sound("state", "old", "tensor")),
    Parser(".metadata", in_file(".metadata", parse_metadata), sound("metadata")),
    Parser("header", in_file("model.safetensors", HuggingFace().read), sound("header")),
    Parser("shard", in_file("shard-00001-model-00001-of-00001.safetensors", HuggingFace().read), sound("shard")),
    Parser(
        "index",
        in_file("model.safetensors.index.json", HuggingFace().read),
        sound("index"),
        beside=tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    ),
    Parser("ZeRO's optimizer", parse_partition, of_zero("zero2", "zero3", "experts")),
    Parser("DeepSpeed's model", parse_model_states, of_zero("model", "zero0")),
    of_ranks("rank's file", "ranks", "model_world_size_2_rank_1.pt"),
    of_ranks("rank's optimizer", "ranks", "optim_world_size_2_rank_1.pt"),
    of_ranks("metadata.pkl", "items", "metadata.pkl"),
    of_ranks("index of torch.save files", "bins", "pytorch_model.bin.index.json"),
    of_ranks("Megatron's rank", "megatron", "mp_rank_01/model_optim_rng.pt"),
    of_ranks("Meta's rank", "meta", "consolidated.01.pth"),
    of_ranks("universal optimizer", "universal", "zero/optimizer_state.pt"),
    Parser("journal", in_file("journal.jsonl", parse_journal), lambda: [f"{json.dumps(_UNIT)}\n".encode()]),
    Parser(
        "manifest", in_file("ckptkit.json", manifest.read_manifest), lambda: [manifest.Manifest({"a": _SUM}).to_bytes()]
    ),
    Parser(
        "metrics",
        in_file("metrics.json", retention.read_metrics),
        as_json({"loss": 1.5, "step": 10}),
        (_DEEP, b'{"loss": %s}' % _LARGE),
    ),
    Parser("config.json", in_file("config.json", parse_config), as_json(_CONFIG), _CONFIGS),
    Parser("name", parse_name, lambda: [b"checkpoint-500", b"iter_0000005"]),
)
