"""All options of a conversion: one list for the commands and the public functions."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypedDict, TypeVar

from ckptkit.checkpoints.optimizers.keys import IDS, NAMES
from ckptkit.checkpoints.optimizers.parameter_names import OF_MODEL, ORDER, Order, read_optimizer_order
from ckptkit.entry_points import PluginTable
from ckptkit.errors import Usage, too_small_error
from ckptkit.formats import FORMATS, FormatWriter, get_writer, writable_formats
from ckptkit.io.progress import Progress
from ckptkit.models.names import FAMILIES, HUB, KEEP, get_family, require_known_family_name
from ckptkit.models.names.family import Family
from ckptkit.models.names.family_file import read_family_file
from ckptkit.settings import Help, option_name, settings_of
from ckptkit.state.selection import LIKE, Edits
from ckptkit.words import join_with_or, parse_bytes

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULT_SHARD_SIZE = 5 * 10**9
MASTER, MODULE = "master", "module"  # fp32 weights that the optimizer updates, and their 16-bit copy
PEFT, BLOCKS = EXPERTS_LAYOUTS = ("peft", "blocks")  # layouts of lora_B for fused experts, see `adapters.experts`
# forms of the expert matrices in adapters, see `plugins.expert_adapters`; ckptkit does not write `stacked`
FLAT, PER_EXPERT, THREE_D, STACKED = "flat", "per-expert", "3d", "stacked"
ADAPTER = "adapter"  # output: the checkpoint's adapter as Hugging Face files
RANK = "rank"  # `--part rank`: one part per process of torchrun


class KnownQuantizer(NamedTuple):
    """A quantization method: the `module:function` that returns a `Model` quantized according to `ConvertOptions`."""

    quantize: str


QUANTIZERS = PluginTable(
    "ckptkit.quantizers",
    KnownQuantizer,
    dict.fromkeys(
        ("fp8-block", "fp8-channel", "fp8-block-ue8m0"),
        KnownQuantizer("ckptkit.plugins.quantize.quantize:quantize"),
    ),
)


class KnownExpertForm(NamedTuple):
    """A form of expert matrices: the `module:function` that converts an adapter and its config to it."""

    convert: str


EXPERT_FORMS = PluginTable(
    "ckptkit.expert_forms",
    KnownExpertForm,
    dict.fromkeys(
        (FLAT, PER_EXPERT, THREE_D),
        KnownExpertForm("ckptkit.plugins.expert_adapters.convert:convert_expert_matrices"),
    ),
)

_OF_THIS_PROCESS = {"of_this_process": True}  # not compared between processes that share the work


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """The options of a conversion. Create them with `of`, which checks them.

    Without `optimizer_keys`, an optimizer does not change, except in a file that is converted to shards: then it gets
    names if they are certain. `weights` are the factors of an average, one for each checkpoint. `scales` are the
    factors of adapters that are merged into the first of several. With `only_sharded`, only the sharded components are
    converted, if there are any; the others are copied unchanged.
    """

    to: str
    world_size: Annotated[
        int | None, Help("Number of ranks to write DCP for; by default as in the source.", "N", least=1)
    ] = None
    under: Annotated[str, Help("Put everything under this key, such as model.", "KEY")] = ""
    optimizer_keys: Annotated[
        str | None, Help("Write the optimizer's parameters by name (names) or by index (ids).", "names|ids")
    ] = None
    optimizer_order: Annotated[
        str | None,
        Help(
            "Order of the optimizer's parameters: model (order of model.parameters()), or a file with one name per "
            "line. ckptkit refuses an order that the checkpoint contradicts.",
            "model|FILE",
        ),
    ] = None
    complete_optimizer: Annotated[
        bool, Help("Write zeros as the state of parameters that never received a gradient.")
    ] = False
    weights: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    only_sharded: bool = False
    dtype: Annotated[
        tuple[str, ...],
        Help(
            "Dtype of weights: keep, bf16, fp16, fp32, fp64, or like:MODEL (the dtypes of MODEL); "
            "'GLOB=DTYPE' for matches; repeatable.",
            "DTYPE",
        ),
    ] = ()
    max_shard_size: Annotated[int, Help("Largest safetensors file, like 5GB or 512MiB.", "SIZE")] = DEFAULT_SHARD_SIZE
    base: Annotated[str | None, Help("Take config and tokenizer from this directory or Hub id.", "MODEL")] = None
    from_base: Annotated[
        tuple[str, ...],
        Help("Also copy the tensors of --base that match and that SRC does not have; repeatable.", "GLOB"),
    ] = ()
    text_only: Annotated[bool, Help("Write only the text model of a vision-language model, with its own config.")] = (
        False
    )
    quantize: Annotated[
        str | None,
        Help(
            "Quantize weights of linear layers to 8 bits, with scales for blocks or rows.",
            "fp8-block|fp8-channel|fp8-block-ue8m0",
        ),
    ] = None
    exclude_quantize: Annotated[
        tuple[str, ...], Help("With --quantize: do not quantize matching weights; repeatable.", "GLOB")
    ] = ()
    merge: Annotated[bool, Help("Merge the adapter into its base: the base in the checkpoint, or --base.")] = False
    adapter_config: Annotated[str | None, Help("The adapter_config.json, if it is not beside the adapter.", "FILE")] = (
        None
    )
    experts_layout: Annotated[
        str | None,
        Help(
            "For adapters of fused experts: the layout of lora_B, if no file records it.",
            "peft|blocks",
        ),
    ] = None
    experts: Annotated[
        str | None,
        Help("Write the matrices of experts of an adapter in this form.", "flat|per-expert|3d"),
    ] = None
    include: Annotated[tuple[str, ...], Help("Use only matching entries; repeatable.", "GLOB")] = ()
    exclude: Annotated[tuple[str, ...], Help("Skip matching entries; repeatable.", "GLOB")] = ()
    rename: Annotated[
        tuple[str, ...], Help("Rename parameters, also in the optimizer; repeatable.", "'REGEX=>TEXT'")
    ] = ()
    allow_unmatched: Annotated[bool, Help("Allow globs and regexes that match nothing.")] = False
    names: Annotated[
        str | None, Help("Names to write: hub, keep (the source's names), or a family of names.", "FAMILY")
    ] = None
    map: Annotated[str | None, Help("Your own table of names, used before the built-in ones.", "TOML")] = None
    vocab_size: Annotated[
        int | None, Help("Rows of embedding and head: add zero rows, or drop the last rows.", "N", least=1)
    ] = None
    weights_from: Annotated[
        str | None,
        Help(
            "Which copy of the weights: master (fp32 copies, including those in the optimizer), or "
            "module (16-bit copies).",
            "master|module",
        ),
    ] = None
    strict: Annotated[
        bool,
        Help(
            "Fail if config.json is missing or does not describe a tensor, or if unknown tensors or "
            "files would be lost."
        ),
    ] = False
    salvage: Annotated[
        bool,
        Help("Write the undamaged tensors of a damaged checkpoint, list the lost ones, and warn if any are lost."),
    ] = False
    fill_from: Annotated[str | None, Help("With --salvage: take lost tensors from another checkpoint.", "OTHER")] = None
    overwrite: Annotated[
        bool, Help("Replace an existing output, if it is one checkpoint and contains nothing else.")
    ] = False
    dry_run: Annotated[bool, Help("Show what ckptkit would do, and write nothing.")] = field(
        default=False, metadata=_OF_THIS_PROCESS
    )
    jobs: Annotated[
        int | None,
        Help(
            "Threads; by default one per core but at most 8, 16 for a remote source, 8 for an output in a store.",
            "N",
            least=1,
        ),
    ] = field(default=None, metadata=_OF_THIS_PROCESS)
    part: Annotated[str | None, Help("Write part I of N; after all parts, run `ckptkit finalize OUT`.", "I/N")] = field(
        default=None, metadata=_OF_THIS_PROCESS
    )
    sync: Annotated[bool, Help("Do not wait for the disk: faster, not safe from power loss.")] = field(
        default=True, metadata=_OF_THIS_PROCESS
    )
    progress: Progress | None = field(default=None, metadata=_OF_THIS_PROCESS)

    @classmethod
    def of(cls, given: Keywords, **more: Any) -> Self:
        """Return the options that users have `given`, and `more`.

        An option with several values also accepts a single string or a list. Raises TypeError for an unknown option,
        `Usage` for options that contradict each other or the format.
        """
        if unknown := given.keys() - Keywords.__annotations__.keys():
            raise TypeError(f"unknown option `{min(unknown)}`")
        options = cls(**{name: normalize_option(name, value) for name, value in {**given, **more}.items()})
        options.check()
        return options

    def check(self) -> None:
        """Raise `Usage` for invalid values, and for options that contradict each other or the format."""
        for name, setting in settings_of(ConvertOptions).items():
            if setting.least is not None and (number := getattr(self, name)) is not None and number < setting.least:
                raise too_small_error(name, setting.least, number)
        if self.to not in (*FORMATS, ADAPTER):
            raise Usage(f"unknown format `{self.to}`", hint=f"use one of {', '.join((*writable_formats(), ADAPTER))}")
        for option, words in CHOICES.items():
            if (value := getattr(self, option)) is not None and value not in words:
                raise Usage(f"{option_name(option)}: expected {join_with_or(words)}, found `{value}`")
        if self.rename or self.dtype:
            self.edits.check_rule_syntax()
        if self.names or self.map:
            require_known_family_name(self.names, self.table)
        if self.part not in (None, RANK):
            parse_part(self.part)
        refuse_contradictions(self)
        _ = self.order

    @property
    def is_for_hub(self) -> bool:
        """Return whether the output is a Hugging Face model under the Hub's names."""
        return self.writer.is_model_only and self.names in (None, HUB)

    @property
    def wanted_names(self) -> str:
        """Return the family of names for the output: the Hub's for model formats, else the present names."""
        return self.names or (HUB if self.writer.is_model_only or self.map else KEEP)

    @property
    def family(self) -> Family | None:
        """Return the family of names for the output; None for the Hub's names, a table's, or the model's own."""
        names = self.names or HUB
        return get_family(names) if names in FAMILIES else None

    @property
    def changes_names(self) -> bool:
        """Return whether the model gets a family's names, or another vocabulary."""
        return bool(self.names not in (None, KEEP) or self.map or self.vocab_size)

    @property
    def writer(self) -> FormatWriter:
        return get_writer("hf" if self.to == ADAPTER else self.to)

    @property
    def wanted_optimizer_keys(self) -> str | None:
        """Return whether optimizers must get names or indices; None if they keep theirs, or the format decides."""
        needs_names = self.optimizer_order is not None and not self.complete_optimizer
        return self.optimizer_keys or (NAMES if needs_names else None)

    @property
    def order(self) -> Order | None:
        """Return the user's order of the optimizer's parameters. Raises `Usage` for an invalid one."""
        return None if self.optimizer_order is None else read_optimizer_order(self.optimizer_order)

    @property
    def table(self) -> Family | None:
        """Return the user's table of names, None without one. Raises `Usage` for an invalid table."""
        return None if self.map is None else read_family_file(Path(self.map))

    @property
    def edits(self) -> Edits:
        return Edits(self.include, self.exclude, self.rename, self.dtype, self.allow_unmatched)

    def to_json(self) -> dict[str, Any]:
        """Return the options that must be equal in all parts of one conversion."""
        common = [field.name for field in fields(self) if not field.metadata]
        return {name: with_absolute_paths(name, getattr(self, name)) for name in common}


CHOICES: dict[str, Collection[str]] = {
    "weights_from": (MASTER, MODULE),
    "optimizer_keys": (NAMES, IDS),
    "experts": EXPERT_FORMS,
    "experts_layout": EXPERTS_LAYOUTS,
    "quantize": QUANTIZERS,
}


def refuse_contradictions(asked: ConvertOptions) -> None:  # noqa: C901, PLR0912, PLR0915 - one list
    """Raise `Usage` for options that contradict each other or the format."""
    to, is_for_model = asked.to, asked.writer.is_model_only
    if asked.world_size is not None and not asked.writer.is_sharded:
        raise Usage(f"--world-size has no effect: `{to}` is the same for any number of ranks", hint="drop --world-size")
    if asked.under and is_for_model:
        message = "--under: the weights of a Hugging Face model cannot be under a key"
        raise Usage(message, hint="add a prefix with --rename '^=>KEY.'")
    if asked.writer.drafted_by and (asked.under or asked.optimizer_keys == IDS):
        option = "--under" if asked.under else "--optimizer-keys ids"
        message = f"{option} has no effect: `{to}` has fixed keys, and names the optimizer's parameters"
        raise Usage(message, hint=f"drop {option}")
    if asked.optimizer_keys and is_for_model:
        message = "--optimizer-keys has no effect: a Hugging Face model has no optimizer"
        raise Usage(message, hint="drop --optimizer-keys")
    if asked.optimizer_order is not None and is_for_model:
        raise Usage(f"{ORDER} has no effect: a Hugging Face model has no optimizer", hint=f"drop {ORDER}")
    if asked.complete_optimizer and (is_for_model or asked.merge):
        raise Usage("--complete-optimizer has no effect: the output has no optimizer", hint="drop --complete-optimizer")
    if asked.max_shard_size != DEFAULT_SHARD_SIZE and not is_for_model:
        message = f"--max-shard-size has no effect: `{to}` does not write safetensors files"
        raise Usage(message, hint="drop --max-shard-size")
    if asked.adapter_config and not (asked.merge or is_for_model):
        message = f"--adapter-config has no effect: `{to}` copies adapters unchanged"
        raise Usage(message, hint="drop --adapter-config, or pass --merge")
    if asked.to == ADAPTER and asked.merge:
        message = "--merge cannot be combined with --to adapter: a merged model is not an adapter"
        raise Usage(message, hint="drop --merge, or pass --to hf")
    if asked.experts and (asked.merge or not is_for_model):
        message = "--experts has no effect: the output is not an adapter"
        raise Usage(message, hint="pass --to adapter, or drop --experts")
    if asked.experts_layout and not (asked.merge or asked.experts):
        message = "--experts-layout has no effect without --merge or --experts"
        raise Usage(message, hint="pass --merge or --experts, or drop --experts-layout")
    if asked.merge and asked.changes_names:
        message = "--merge cannot be combined with --names, --map or --vocab-size: they would change the base first"
        raise Usage(message, hint="merge first, then consolidate the result with --names, --map or --vocab-size")
    if asked.text_only and not asked.is_for_hub:
        message = "--text-only writes a Hugging Face model under the Hub's names only"
        raise Usage(message, hint="run `ckptkit consolidate SRC OUT --text-only` first, then convert OUT")
    if asked.text_only and (asked.merge or asked.from_base or asked.vocab_size):
        hint = "consolidate with the other options first, then consolidate the result with --text-only"
        raise Usage("--text-only cannot be combined with --from-base, --merge or --vocab-size", hint=hint)
    if asked.from_base and asked.base is None:
        raise Usage("--from-base copies tensors of --base, but --base is missing", hint="pass --base MODEL")
    if asked.from_base and not asked.is_for_hub:
        hint = "run `ckptkit consolidate SRC OUT --base MODEL --from-base GLOB` first, then convert OUT"
        raise Usage("--from-base writes a Hugging Face model under the Hub's names only", hint=hint)
    if asked.from_base and asked.merge:
        message = "--from-base cannot be combined with --merge or --quantize"
        raise Usage(message, hint="consolidate with --merge first, then consolidate the result with --from-base")
    if asked.from_base and asked.quantize:
        message = "--from-base cannot be combined with --merge or --quantize"
        raise Usage(message, hint="consolidate with --from-base first, then consolidate the result with --quantize")
    if asked.from_base and asked.weights:
        message = "--from-base cannot be combined with an average"
        raise Usage(message, hint="average first, then consolidate the result with --from-base")
    if asked.weights and asked.quantize:
        message = "ckptkit does not quantize an average"
        raise Usage(message, hint="average first, then run `ckptkit consolidate MEAN OUT --quantize`")
    if asked.exclude_quantize and asked.quantize is None:
        raise Usage("--exclude-quantize does nothing without --quantize", hint="add --quantize")
    if asked.quantize and not is_for_model:
        message = f"--quantize: `{to}` cannot store quantized weights"
        raise Usage(message, hint="run `ckptkit consolidate SRC OUT --quantize` instead")
    if asked.quantize and asked.merge:
        message = "ckptkit does not merge and quantize in one step"
        raise Usage(message, hint="merge first, then consolidate the result with --quantize")
    if asked.quantize and asked.names not in (None, HUB):
        message = "--names cannot be combined with --quantize: loaders of quantized weights look for the Hub's names"
        raise Usage(message, hint="drop --names")
    if asked.fill_from is not None and not asked.salvage:
        raise Usage("--fill-from is only for damaged checkpoints, with --salvage", hint="pass --salvage too")
    if asked.salvage and asked.part is not None:
        raise Usage("--salvage runs in one process only", hint="drop --part, and reshard the result in parts")
    if asked.salvage and (asked.merge or asked.weights or asked.quantize):
        raise Usage("--salvage allows no other changes", hint="salvage the checkpoint first, then convert the result")
    if asked.base and not (is_for_model or asked.merge or asked.changes_names):
        raise Usage(f"--base has no effect: ckptkit does not compare `{to}` with a config.json", hint="drop --base")


class Keywords(TypedDict, total=False):
    """The options of every function that writes a checkpoint. `ConvertOptions` explains them."""

    dtype: str | torch.dtype | Sequence[str | torch.dtype]
    quantize: str | None
    exclude_quantize: str | Sequence[str]
    max_shard_size: int | str
    base: str | Path | None
    from_base: str | Sequence[str]
    text_only: bool
    merge: bool
    adapter_config: str | Path | None
    experts_layout: str | None
    experts: str | None
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    rename: str | Sequence[str]
    allow_unmatched: bool
    map: str | Path | None
    vocab_size: int | None
    names: str | None
    weights_from: str | None
    strict: bool
    salvage: bool
    fill_from: str | Path | None
    overwrite: bool
    dry_run: bool
    jobs: int | None
    part: str | None
    sync: bool
    progress: Progress | None


def with_full_signature(function: Function) -> Function:
    """Give a function that takes `**options` a signature with every option, for `help()`, notebooks and the docs."""
    signature = inspect.signature(function)
    explicit = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    defaults = {field.name: field.default for field in fields(ConvertOptions)}
    hints = {name: getattr(hint, "__forward_arg__", hint) for name, hint in Keywords.__annotations__.items()}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in hints.items()
    ]
    function.__signature__ = signature.replace(parameters=[*explicit, *options])  # type: ignore[attr-defined]
    return function


_LISTS = ("include", "exclude", "from_base", "exclude_quantize", "rename", "weights", "scales")


def normalize_option(name: str, value: Any) -> Any:
    """Return an option in the form that `ConvertOptions` stores."""
    if name == "dtype":
        rules = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        return tuple(map(str, rules))
    if name == "max_shard_size":
        return parse_bytes(value)
    if name in _LISTS:
        return (value,) if isinstance(value, str) else tuple(value)
    return str(value) if isinstance(value, os.PathLike) else value


def with_absolute_paths(name: str, value: Any) -> Any:
    """Return an option with absolute paths, for processes with other working directories."""
    if name == "dtype":
        rules = (rule.partition(LIKE) for rule in value)
        return tuple(
            f"{before}{like}{Path(model).absolute() if like and Path(model).is_dir() else model}"
            for before, like, model in rules
        )
    if name in ("map", "adapter_config", "optimizer_order") and value not in (None, OF_MODEL):
        return str(Path(value).absolute())
    if name in ("base", "fill_from") and value is not None and Path(value).exists():
        return str(Path(value).absolute())
    return value


def parse_part(part: str) -> tuple[int, int]:
    """Return the numbers in `3/8`. Raises `Usage` for anything else."""
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        hint = "pass 1/8 for the first of eight parts, 8/8 for the last"
        raise Usage(f"expected a part like 1/8, found `{part}`", hint=hint)
    return int(number), int(count)
