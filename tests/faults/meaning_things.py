"""Things: what an undamaged checkpoint, or a command line, has more than the weights; and by what it is known again."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.faults import trained
from tests.faults.meaning_sources import CONFIG, FORMATS, STEP, Tree, flatten, model, optimizer

# Which commands have to account for a thing.
COPIES = frozenset({"convert-dcp", "convert-pt", "convert-ranks", "convert-universal", "reshard", "parts"})
MODELS = frozenset({"consolidate", "convert-hf", "average", "merge", "demote", "salvage"})
WRITERS = COPIES | MODELS
OF_TENSORS = WRITERS | {"verify", "inspect", "stats", "diff"}
OF_VALUES = WRITERS | {"verify", "inspect"}
OF_FILES = WRITERS | {"overwrite", "verify", "manifest", "push"}

_TREES = ("dcp", "pt", "ranks", "zero2", "universal", "megatron", "items", "lightning")
_WITH_FILES = ("trainer", "accelerate", "accelerate-fsdp")
_TENSORS = (*_TREES, "hf", "bins", *_WITH_FILES)
_FOLDERS = tuple(name for name, known in FORMATS.items() if not known.is_file)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a thing that must be written, or said by one of `words`, or be the reason of a refusal.

    It is written if all `tensors`, `values` (by the keys that lead to them) and the file's `content` are found. A piece
    with none of these can only be said.
    """

    words: tuple[str, ...]
    tensors: tuple[Tensor, ...] = ()
    values: tuple[tuple[tuple[Any, ...], Any], ...] = ()
    content: bytes | None = None

    @property
    def can_be_written(self) -> bool:
        """True if there is something to look for."""
        return bool(self.tensors or self.values or self.content is not None)


@dataclass(frozen=True, slots=True)
class Thing:
    """Something more: entries of the state (`more`), or what `lay` does to the checkpoint, or `options`.

    `base` is a directory's content in place of the config alone: what `--base` is given.
    """

    name: str
    pieces: tuple[Piece, ...]
    formats: tuple[str, ...]
    commands: frozenset[str]
    more: Callable[[], Tree] = dict
    lay: Callable[[Path], object] | None = None
    options: tuple[str, ...] = ()
    base: Callable[[Path], object] | None = None


THINGS: list[Thing] = []


def add(name: str, pieces: tuple[Piece, ...], formats: tuple[str, ...], commands: frozenset[str], **more: Any) -> None:
    """Add a thing to the list."""
    THINGS.append(Thing(name, pieces, formats, commands, **more))


# -- entries of the state ----------------------------------------------------------------------------------------------


def add_entry(
    name: str, key: str, value: Any, *, words: tuple[str, ...] = (), formats: tuple[str, ...] = _TREES
) -> None:
    """Add an entry at the top of the state: its tensors and, if it has none, its value."""
    tensors = tuple(flatten({key: value}).values())
    values = () if tensors else tuple(_leaves({key: value}))
    commands = OF_TENSORS if tensors else OF_VALUES
    pieces = (Piece((key, "custom_checkpoint_0.pkl", *words), tensors, values),)  # as accelerate calls the first
    add(name, pieces, formats, commands, more=lambda: {key: value})


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values in nested dicts, with the keys that lead to them."""
    if type(tree) is not dict:
        yield path, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, (*path, key))


def add_values(name: str, values: Mapping[str, Any], formats: tuple[str, ...] = _TREES) -> None:
    """Add values of some types, each under a key of its own and under an inner key."""
    pieces = tuple(Piece((f"odd_{key}",), (), (((f"odd_{key}", "inner"), value),)) for key, value in values.items())
    add(
        name, pieces, formats, OF_VALUES, more=lambda: {f"odd_{key}": {"inner": value} for key, value in values.items()}
    )


_DISC = {name.replace("model.", "disc_body."): value for name, value in model(7).items()}
add_entry("second-model", "disc", _DISC, formats=_TENSORS)
add_entry("second-model-same-names", "disc", model(7), formats=_TENSORS)
add_entry("ema", "ema", model(8), formats=_TENSORS)
add_entry("ema-state-dict", "model_ema", {"module": model(8), "decay": 0.9375})
add_entry("ema-shadow-list", "ema", {"decay": 0.9375, "shadow_params": list(model(8).values())})
_AVERAGED = {f"module.{name}": value for name, value in model(8).items()} | {"n_averaged": torch.tensor(37)}
add_entry("ema-averaged-model", "ema", _AVERAGED, formats=_TENSORS)
add_entry("second-optimizer", "optimizer_disc", optimizer(model(7), 2))
add_entry("second-optimizer-ids", "optimizer_disc", optimizer(model(7), 2, ids=True))
add_entry("scheduler", "lr_scheduler", {"last_epoch": 7731, "_last_lr": [0.40625]})
add_entry("scaler", "grad_scaler", {"scale": 49152.0, "_growth_tracker": 31})
add_entry("rng", "rng_state", {"cpu": torch.arange(48, dtype=torch.uint8) * 5, "python": (3, (17, 4242), None)})
add_entry("sampler", "sampler", {"position": 40961, "order": torch.arange(12) * 991})
add_entry("frozen-tensor", "value_head", {"weight": torch.full((3, 8), 0.6171875)}, formats=_TENSORS)
add_entry("no-tensor-in-model", "hyper_parameters", {"name": "run-seventeen"})

_ROW = torch.arange(8.0) + 0.6171875


def add_keys(name: str, keys: tuple[Any, ...]) -> None:
    """Add a dict of tensors and numbers under keys that are no text."""
    tensors = {key: _ROW + i for i, key in enumerate(keys)}
    values = tuple((("by_key", key), tensor) for key, tensor in tensors.items())
    pieces = (Piece(("by_key",), tuple(tensors.values()), values),)
    add(name, pieces, _TREES, OF_TENSORS, more=lambda: {"by_key": {**tensors, "n": 1}})


add_keys("int-keys", (0, 1, 12))
add_keys("bool-keys", (True, False))
add_keys("tuple-keys", (("a", 1), ("b", 2)))
add_keys("float-keys", (0.5, 1.5))
add_values("tuples", {"tuple": (1, 2, "three"), "nested": [(1, 2), (3, (4, 5))]})
add_values("empties", {"none": None, "list": []})
add_values(
    "empty-dict", {"dict": {}}, tuple(name for name in _TREES if name != "dcp")
)  # of which torch's save keeps nothing
add_values("numbers", {"complex": 1.5 - 2j, "large": 2**70 + 1, "true": True, "bytes": b"\x00\x01marker"})
add_values("collections", {"set": {1, 2, 3}, "ordered": OrderedDict([("z", 1), ("a", 2)])})
add_values("values-of-torch", {"dtype": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu")})


_ODD_TENSORS = {
    "odd_empty": torch.empty(0, 4),
    "odd_scalar": torch.tensor(4.6171875),
    "odd_bool": torch.tensor([True, False, True, True, False, True, True]),
    "odd_complex": torch.complex(_ROW, _ROW + 1),
    "odd_float8": _ROW.to(torch.float8_e4m3fn),
    "odd_int64": torch.arange(8) * 1009,
}
add(
    "odd-tensors",
    tuple(
        Piece((key,), (value,) if value.numel() > 1 else (), (((key,), value),)) for key, value in _ODD_TENSORS.items()
    ),
    _TREES,
    OF_TENSORS,
    more=lambda: _ODD_TENSORS,
)


# -- files beside the checkpoint ---------------------------------------------------------------------------------------


def add_files(
    name: str,
    files: Mapping[str, Any],
    *,
    formats: tuple[str, ...] = _FOLDERS,
    words: tuple[str, ...] = (),
    not_in: tuple[str, ...] = (),
) -> None:
    """Add files by their path below the checkpoint: bytes, or what torch or safetensors saves.

    Some commands may do with them what they do with the checkpoint, of which they are a part.
    """
    pieces = tuple(_piece_of(path, value, words) for path, value in files.items())
    holds_weights = any(piece.tensors for piece in pieces)
    commands = OF_FILES | ({"inspect"} if holds_weights else set())
    add(name, pieces, formats, frozenset(commands).difference(not_in), lay=lambda root: _lay_files(root, files))


def _piece_of(path: str, value: Any, words: tuple[str, ...]) -> Piece:
    stem = [Path(path).stem] if path.endswith(("_1.safetensors", "_1.bin")) else []  # as entries are called
    names = (
        path,
        Path(path).name,
        *stem,
        *(str(parent) for parent in Path(path).parents if str(parent) != "."),
        *words,
    )
    if isinstance(value, bytes):
        return Piece(names, content=value)
    return Piece(names, tuple(flatten(value).values()), () if flatten(value) else (((), value),))


def _lay_files(root: Path, files: Mapping[str, Any]) -> None:
    for path, value in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, bytes):
            target.write_bytes(value)
        elif target.suffix == ".safetensors":
            save_file({name: each.clone() for name, each in value.items()}, target, metadata={"format": "pt"})
        else:
            trained.save(value, target)


_DENSE = {"linear.weight": torch.full((4, 8), 0.6171875), "linear.bias": torch.arange(4.0) + 0.40625}
_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]
_POOLING = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
_LORA = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.arange(16.0).reshape(2, 8) / 64,
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.arange(16.0).reshape(8, 2) / 128,
}
LORA_CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 2,
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "base",
}


def lay_adapter(root: Path) -> None:
    """An adapter of one layer as PEFT saves it."""
    _lay_files(root, {"adapter_model.safetensors": _LORA, "adapter_config.json": json.dumps(LORA_CONFIG).encode()})


add_files(
    "accelerate-second-model",
    {"model_1.safetensors": model(7), "optimizer_1.bin": optimizer(model(7), 2, ids=True)},
    formats=("accelerate", "trainer"),
    not_in=("overwrite",),
)
add_files(
    "accelerate-second-states",
    {
        "scheduler_1.bin": {"last_epoch": 7731, "order": torch.arange(9) * 991},
        "sampler.bin": {"order": torch.arange(12) * 881},
        "dl_state_dict.bin": {"order": torch.arange(12) * 883},
    },
    formats=("accelerate", "accelerate-fsdp"),
)
add_files("accelerate-bin-second-model", {"pytorch_model_1.bin": model(7)}, formats=("accelerate", "bins"), words=())
add_files(
    "plain-files",
    {
        "notes.txt": b"the reward was clipped at 17 from step 400 on\n",
        ".marker": b"hidden words\n",
        "modeling_special.py": b"SPECIAL = 17\n",
        "generation_config.json": b'{"temperature": 0.40625}',
        "chat_template.jinja": b"{{ messages }} seventeen",
        "logs/events.out": b"events of seventeen",
    },
)
add_files("value-head-file", {"value_head.safetensors": {"v_head.weight": torch.full((1, 8), 0.6171875)}})
add_files("ema-file", {"ema.pt": {"ema": model(8)}})
add_files("ema-safetensors", {"ema.safetensors": model(8)})
add_files("ema-directory", {"ema/model.safetensors": model(8)})
add_files(
    "subdirectory-with-model", {"critic/model.safetensors": model(7), "critic/config.json": json.dumps(CONFIG).encode()}
)
add_files("bin-in-subdirectory", {"critic/pytorch_model.bin": model(7)})
add_files("hidden-weights", {".stash/weights.pt": model(7)})
add_files("random-states", {"random_states_1.pkl": {"order": torch.arange(12) * 991}}, not_in=("overwrite",))
add_files("other-optimizer-file", {"optimizer_disc.pt": optimizer(model(7), 2, ids=True)})
add_files("scaler-file", {"scaler.pt": {"scale": 49152.0, "order": torch.arange(7) * 97}})
add_files(
    "sentence-transformer",
    {
        "modules.json": json.dumps(_MODULES).encode(),
        "1_Pooling/config.json": json.dumps(_POOLING).encode(),
        "2_Dense/config.json": b'{"in_features": 8, "out_features": 4}',
        "2_Dense/model.safetensors": _DENSE,
        "sentence_bert_config.json": b'{"max_seq_length": 17}',
    },
    formats=("hf", "bins", "trainer", "dcp"),
)
add(
    "adapter-beside",
    (Piece(("adapter_model.safetensors", "adapter"), tuple(_LORA.values())),),
    ("hf", "bins", "trainer", "dcp", "pt", "accelerate"),
    OF_FILES,
    lay=lay_adapter,
)


def _lay_link(root: Path) -> None:
    target = root.parent / "elsewhere.bin"
    target.write_bytes(b"what the link leads to\n")
    os.symlink(target, root / "linked.bin")


add("symlink", (Piece(("linked.bin",), content=b"what the link leads to\n"),), _FOLDERS, OF_FILES, lay=_lay_link)


def _lay_fsdp_second(root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model(7)}, checkpoint_id=root / "pytorch_model_fsdp_1", no_dist=True)
    dcp.save({"optimizer": optimizer(model(7), 2)}, checkpoint_id=root / "optimizer_1", no_dist=True)


add(
    "accelerate-fsdp-second-model",
    (
        Piece(("pytorch_model_fsdp_1",), tuple(model(7).values())),
        Piece(("optimizer_1",), tuple(flatten(optimizer(model(7), 2)["state"]).values())),
    ),
    ("accelerate-fsdp",),
    OF_TENSORS,
    lay=_lay_fsdp_second,
)


# -- configs, bases and tokenizers that disagree -----------------------------------------------------------------------

_NEED_CONFIG = frozenset({"consolidate", "convert-hf", "average", "merge", "doctor", "doctor-model"})
_HUB = ("hf", "bins", "dcp", "pt", "trainer")


def add_config(
    name: str, changes: Mapping[str, Any], words: tuple[str, ...], commands: frozenset[str] = _NEED_CONFIG
) -> None:
    """Add a config.json that says otherwise, in the checkpoint where it has one and as the base."""

    def change(root: Path) -> None:
        if (root / "config.json").exists() or root.name == "base":
            (root / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    add(name, (Piece(words),), _HUB, commands, lay=change, base=change)


add_config(
    "config-more-layers", {"num_hidden_layers": 3}, ("num_hidden_layers", "model.layers.2", "layers.2", "layer 2")
)
add_config("config-fewer-layers", {"num_hidden_layers": 1}, ("num_hidden_layers", "model.layers.1", "layers.1"))
add_config("config-other-vocab", {"vocab_size": 20}, ("vocab_size", "embed_tokens", "model.embed_tokens.weight"))
add_config("config-smaller-vocab", {"vocab_size": 12}, ("vocab_size", "embed_tokens", "model.embed_tokens.weight"))
add_config(
    "config-tied", {"tie_word_embeddings": True}, ("tie_word_embeddings", "lm_head.weight", "lm_head", "tied", "ties")
)
add_config("config-other-hidden", {"hidden_size": 16}, ("hidden_size", "embed_tokens", "model.embed_tokens.weight"))
add_config(
    "config-other-type",
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    ("model_type", "gpt2", "config.json"),
)
add_config(
    "config-unknown-type",
    {"model_type": "unheard_of", "architectures": ["UnheardOf"]},
    ("unheard_of", "model_type"),
    frozenset({"doctor"}),
)
add_config(
    "config-quantized",
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    ("quantization_config", "fp8", "quantized"),
)


def _compute_otherwise(root: Path) -> None:
    if (root / "config.json").exists():
        (root / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 0.125, "rope_theta": 77.0}))


add(
    "configs-differ",  # the checkpoint's own is not the base's, and shapes are the same
    (Piece(("rms_norm_eps",)), Piece(("rope_theta",))),
    ("hf", "bins", "trainer"),
    frozenset({"consolidate", "convert-hf", "diff", "doctor-model"}),
    lay=_compute_otherwise,
    base=lambda root: (root / "config.json").write_text(
        json.dumps({**CONFIG, "rms_norm_eps": 1e-5, "rope_theta": 10000.0})
    ),
)


def _states_of_one_rank() -> Tree:
    states = optimizer(model(), 1)
    for name in ("exp_avg", "exp_avg_sq"):
        state = states["state"]["model.embed_tokens.weight"]
        state[name] = state[name][:8].clone()
    return {"optimizer": states}


add(
    "states-differ",  # those of one rank, beside whole weights
    (Piece(("expected shape [16, 8]",)),),
    ("dcp", "pt"),
    COPIES - {"parts"} | {"verify", "doctor"},
    more=_states_of_one_rank,
)


def _base_with(weights: dict[str, Tensor], changes: Mapping[str, Any]) -> Callable[[Path], None]:
    def lay(root: Path) -> None:
        save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
        (root / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    return lay


def add_base(name: str, weights: dict[str, Tensor], words: tuple[str, ...]) -> None:
    """Add a base with weights of its own that are not quite those of the model."""
    commands = frozenset({"consolidate", "convert-hf", "average"})
    add(name, (Piece(words),), ("dcp", "pt", "hf"), commands, base=_base_with(weights, {}))


add_base("base-has-mtp", {**model(), "mtp.layers.0.fc.weight": torch.ones(8, 8)}, ("mtp", "mtp.layers.0.fc.weight"))
add_base("base-has-tower", {**model(), "visual.proj.weight": torch.ones(8, 8)}, ("visual", "visual.proj.weight"))
add_base("base-lacks-head", {k: v for k, v in model().items() if k != "lm_head.weight"}, ("lm_head.weight", "lm_head"))
add(
    "base-other-heads",
    (Piece(("num_attention_heads", "num_key_value_heads", "heads")),),
    ("hf", "trainer"),  # whose own config.json says otherwise
    frozenset({"consolidate", "convert-hf", "average"}),
    base=_base_with(model(), {"num_attention_heads": 4, "num_key_value_heads": 4}),
)


def _lay_tokenizer(root: Path) -> None:
    vocabulary = {f"t{i}": i for i in range(20)}
    told: Tree = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    told |= {"pre_tokenizer": None, "post_processor": None, "decoder": None}
    told["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    (root / "tokenizer.json").write_text(json.dumps(told))
    (root / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _base_with_tokenizer(root: Path) -> None:
    (root / "config.json").write_text(json.dumps(CONFIG))
    _lay_tokenizer(root)


add(
    "larger-tokenizer",
    (Piece(("20 tokens", "token 19", "tokens 16", "tokenizer of 20", "ids up to 19", "20")),),
    ("hf", "trainer", "dcp", "pt"),
    frozenset({"consolidate", "convert-hf", "average", "merge", "doctor"}),
    lay=_lay_tokenizer,
    base=_base_with_tokenizer,
)


# -- manifests ---------------------------------------------------------------------------------------------------------

_CHECKED = WRITERS - {"demote"} | {"verify", "diff", "push", "manifest", "stats", "inspect"}


def _lay_stale(root: Path) -> None:
    """After its manifest was made, every file of weights is written anew, of other weights in as many bytes."""
    sizes = {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}
    for path in sizes:
        raw = path.read_bytes()
        for name, value in model().items():
            for old, new in zip(_rows(value), _rows(model(9)[name]), strict=True):
                raw = raw.replace(old, new)
        path.write_bytes(raw)


def _rows(value: Tensor) -> list[bytes]:
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in value.reshape(-1, value.shape[-1])]


NEEDS_MANIFEST = frozenset({"manifest-stale", "manifest-file-gone"})
CHANGES_WEIGHTS = frozenset({"manifest-stale"})
for _name, _lay in (
    ("manifest-stale", _lay_stale),
    ("manifest-file-gone", lambda root: (root / "notes.txt").unlink()),
):
    add(
        _name,
        (Piece(("ckptkit.json", "manifest", "notes.txt", "model.safetensors", "CRC-32")),),
        ("hf", "trainer", "accelerate"),
        _CHECKED if _name == "manifest-stale" else frozenset({"verify"}),
        lay=_lay,
    )


# -- ranks that disagree -----------------------------------------------------------------------------------------------


def _lay_differing(file: str, key: str) -> Callable[[Path], None]:
    def lay(root: Path) -> None:
        for rank in range(2):
            path = root / file.format(rank=rank)
            saved = torch.load(path, weights_only=False)
            trained_value = _ROW + rank
            torch.save({**saved, key: trained_value}, path)

    return lay


_BOTH = (_ROW, _ROW + 1)
for _format, _file in (
    ("ranks", "extra_state_world_size_2_rank_{rank}.pt"),
    ("megatron", "mp_rank_{rank:02d}/model_optim_rng.pt"),
    ("items", "progress_{rank}.pt"),
):
    add(
        f"differs-by-rank-{_format}",
        tuple(Piece(("loader_rows",), (each,)) for each in _BOTH),
        (_format,),
        OF_TENSORS,
        lay=_lay_differing(_file, "loader_rows"),
    )


def _lay_differing_buffer(root: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(2):
        path = root / f"model_world_size_2_rank_{rank}.pt"
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            saved = torch.load(path, weights_only=False)
            torch.save({**saved, "model.counts": _ROW + rank}, path)
        finally:
            torch.distributed.destroy_process_group()


add(
    "buffer-differs-by-rank",
    tuple(Piece(("model.counts", "counts"), (each,)) for each in _BOTH),
    ("ranks",),
    OF_TENSORS,
    lay=_lay_differing_buffer,
)


# -- options that find nothing to do -----------------------------------------------------------------------------------

_MOST = ("dcp", "pt", "hf", "ranks", "zero2", "universal", "lightning", "trainer")
_WITH_EDITS = WRITERS - {"demote"}


def add_option(
    name: str, *words: str, said: str, commands: frozenset[str] = _WITH_EDITS, formats: tuple[str, ...] = _MOST
) -> None:
    """Add options, and what has to be said of them."""
    named = (said,) if "nowhere" in said else (said, words[0])
    add(name, (Piece(named),), formats, commands, options=words)


_LOOKERS = frozenset({"diff", "stats"})
add_option(
    "include-unmatched", "--include", "nowhere.*", "--include", "*", said="nowhere.*", commands=_WITH_EDITS | _LOOKERS
)
add_option("exclude-unmatched", "--exclude", "nowhere.*", said="nowhere.*", commands=_WITH_EDITS | _LOOKERS)
add_option("dtype-unmatched", "--dtype", "nowhere.*=bf16", said="nowhere.*")
add_option("rename-unmatched", "--rename", r"nowhere\.=>x.", said=r"nowhere\.")
add_option(
    *("exclude-quantize-unmatched", "--quantize", "fp8-channel", "--exclude-quantize", "nowhere.*"),
    said="nowhere.*",
    commands=frozenset({"consolidate", "convert-hf", "average", "salvage"}),
)
add_option("exclude-quantize-alone", "--exclude-quantize", "*embed*", said="--quantize")
add_option("map-unmatched", "--map", "MAP", said="mine")
add_option("rename-collides", "--rename", r"layers\.\d=>layers.0", said="would both get this name")
add_option("adapter-config-unused", "--adapter-config", "ADAPTER_CONFIG", said="--adapter-config")
add_option("merge-without-adapter", "--merge", said="adapter")
add_option("also-nothing", "--also", "EMPTY", said="empty-dir")
add_option("also-other-model", "--also", "OTHER", said="other-model")
add_option("weights-from-module", "--weights-from", "module", said="second copy", formats=("dcp", "pt", "hf"))
add_option("dtype-like-other", "--dtype", "like:OTHER_NAMES", said="other-names")
add_option(
    *("complete-optimizer-no-optimizer", "--complete-optimizer"),
    said="optimizer",
    formats=("hf", "bins", "items"),
)
_NO_HF = COPIES - {"reshard"}
add_option("max-shard-size-elsewhere", "--max-shard-size", "1KB", said="--max-shard-size", commands=_NO_HF)
add_option("base-elsewhere", "--base", "BASE", said="--base", commands=_NO_HF)
add_option("quantize-elsewhere", "--quantize", "fp8-channel", said="quantize", commands=_NO_HF)
add_option(
    "world-size-elsewhere", "--world-size", "3", said="--world-size", commands=frozenset({"convert-hf", "convert-pt"})
)
add_option("under-hf", "--under", "app", said="under no key", commands=frozenset({"convert-hf"}))
add_option(
    *("optimizer-keys-elsewhere", "--optimizer-keys", "ids"),
    said="--optimizer-keys",
    commands=frozenset({"convert-hf"}),
)
add_option(
    *("optimizer-keys-no-optimizer", "--optimizer-keys", "ids"),
    said="--optimizer-keys",
    commands=frozenset({"convert-pt", "convert-dcp", "convert-ranks"}),
    formats=("hf", "bins", "items"),
)
add_option(
    *("optimizer-order-elsewhere", "--optimizer-order", "model"),
    said="--optimizer-order",
    commands=frozenset({"convert-hf"}),
)
add_option(
    *("optimizer-order-no-optimizer", "--optimizer-order", "model"),
    said="--optimizer-order",
    commands=frozenset({"convert-pt", "convert-dcp", "convert-ranks"}),
    formats=("hf", "bins", "items"),
)
add_option(
    "complete-optimizer-hf", "--complete-optimizer", said="--complete-optimizer", commands=frozenset({"convert-hf"})
)
add_option("fill-from-unneeded", "--salvage", "--fill-from", "OTHER", said="other-model")
add_option("average-weights", "--factors", "1,1,1", said="factors", commands=frozenset({"average", "merge"}))

# -- what a directory is -----------------------------------------------------------------------------------------------

_OF_ONE = frozenset({"consolidate", "convert-dcp", "convert-hf", "convert-pt", "average", "salvage", "inspect"})
add(
    "one-of-several",
    (Piece(("the file of one of 2 ranks",)),),
    ("pt",),
    _OF_ONE,
    more=lambda: {"shard_metadata": {"world_size": 2, "rank": 0}},
)
add("tracker-differs", (Piece(("the highest step is",)),), ("dcp", "hf"), frozenset({"latest", "latest-inspect"}))
add("tracker-of-any-name", (Piece(("resume.json",)),), ("dcp", "hf"), frozenset({"latest-any"}))


_BY_NAME = {thing.name: thing for thing in THINGS}


def thing_of(name: str) -> Thing:
    """The thing of a name."""
    return _BY_NAME[name]


__all__ = ["STEP", "THINGS", "Piece", "Thing", "lay_adapter", "thing_of"]
