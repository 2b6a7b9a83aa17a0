"""Group an adapter's tensors into weight updates of its base, and check them against each other and the config.

Shapes as in PEFT: for a linear layer A is `[r, in]` and B `[out, r]`; for a convolution the axes of the kernel follow;
for an embedding A is `[r, V]` and B `[H, r]`; for E experts A is `[r*E, in]` and B `[out, r*E]`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckptkit.adapters.config import AdapterConfig, ends_with_name
from ckptkit.adapters.find import Adapter
from ckptkit.adapters.names import WRAPPER, Kind, find_expert_place, name_inside_wrapper
from ckptkit.errors import CkptError, Mismatch

_EMBEDDINGS = ("embed_tokens", "lm_head")  # EMBEDDING_LAYER_NAMES in peft/utils/other.py
# names of the input embedding, in order of precedence
_INPUTS = ("shared", "embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
_PARTNERS: dict[Kind, Kind] = {"A": "B", "B": "A", "embedding_A": "embedding_B", "embedding_B": "embedding_A"}


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A low-rank weight update of a module or of one of its parameters: the names of its tensors.

    With a `magnitude` the update is DoRA's; with a `bias` it also changes the module's bias.
    """

    module: str
    depth: int
    a: str
    b: str
    is_embedding: bool
    bias: str | None = None
    magnitude: str | None = None
    attention: str | None = None  # see `Entry.multihead_attention_module`

    def peft_lookup_names(self, config: AdapterConfig) -> tuple[str, ...]:
        """Return the names that PEFT may use to look up targets, ranks and alphas. The base decides between several."""
        if parameters := config.target_parameters_of(self.module):
            return parameters
        if self.attention is None:
            return (self.module,)
        return (self.attention, self.module) if config.target_parameters_of(self.attention) else (self.attention,)


def weight_updates_of(adapter: Adapter) -> Iterator[WeightUpdate]:
    """Yield the low-rank weight updates of an adapter. Raises `Mismatch` if one of the two matrices is missing."""
    names_by_module: dict[tuple[str, int], dict[Kind, str]] = defaultdict(dict)
    for name, entry in adapter.entries.items():
        if entry.kind not in ("module", "tokens"):
            names_by_module[entry.module, entry.depth][entry.kind] = name
    for (module, depth), names in names_by_module.items():
        for kind, name in names.items():
            partner = _PARTNERS.get(kind)
            if partner is not None and partner not in names:
                message = f"the matching lora_{partner} of `{module}` is missing"
                hint = "check that no shard is missing and that --exclude did not drop a tensor that is needed"
                raise Mismatch(message, path=adapter.layout.path, tensor=name, hint=hint)
        is_embedding = "embedding_A" in names
        if not is_embedding and "A" not in names:
            first = next(iter(names.values()))
            raise Mismatch(f"the matrices of `{module}` are missing", path=adapter.layout.path, tensor=first)
        a, b = (names["embedding_A"], names["embedding_B"]) if is_embedding else (names["A"], names["B"])
        attention = adapter.entries[a].multihead_attention_module
        yield WeightUpdate(module, depth, a, b, is_embedding, names.get("bias"), names.get("magnitude"), attention)


def without_tied_duplicates(adapter: Adapter, config: AdapterConfig) -> Adapter:
    """Return an adapter without the trained rows of layers that are tied to an embedding, which are duplicates.

    A training state contains these rows once per tied layer. The layers that the config names keep their rows; if the
    config names none, the model's input embedding keeps them.
    """
    rows = {name: entry.module for name, entry in adapter.entries.items() if entry.kind == "tokens"}
    asked = config.values.get("trainable_token_indices")
    if len(rows) < 2 or asked is None:
        return adapter
    named = map(str, asked) if isinstance(asked, dict) else _INPUTS
    matches_by_layer = [{name for name, module in rows.items() if ends_with_name(module, layer)} for layer in named]
    own = set().union(*matches_by_layer) if isinstance(asked, dict) else next(filter(None, matches_by_layer), set())
    copies = rows.keys() - own if own else set()
    return replace(adapter, entries={name: entry for name, entry in adapter.entries.items() if name not in copies})


def check_adapter_fits_config(adapter: Adapter, config: AdapterConfig) -> None:
    """Raise `Mismatch` if an adapter does not fit its config: wrong rank, module not a target, missing magnitudes.

    A parameter of fused experts has the rows of all experts in one matrix, so its rank must be a multiple of the
    config's.
    """
    targets, updates = config.values.get("target_modules"), list(weight_updates_of(adapter))
    # tied targets are not listed
    has_tied = config.bool_setting("ensure_weight_tying") and any(update.is_embedding for update in updates)
    is_listed = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    asked = config.values.get("layers_to_transform")
    layers = [asked] if isinstance(asked, int) else asked
    for update in updates:
        if config.peft_type != "LORA":
            message = f"expected matrices of {config.peft_type} (`{config.path}`), found matrices of LoRA"
            raise config_mismatch_error(adapter, update.a, message)
        check_matrix_ranks(adapter, config, update)
        names = update.peft_lookup_names(config)
        for name in names:
            config.scaling_of(name)
        if config.bool_setting("use_dora") != (update.magnitude is not None) and not config.target_parameters_of(
            update.module
        ):
            has, says = ("no magnitudes", "DoRA") if update.magnitude is None else ("magnitudes", "no DoRA")
            message = f"`{update.module}` has {has}, but `{config.path}` says {says}"
            raise config_mismatch_error(adapter, update.a, message)
        if (
            is_listed
            and not has_tied
            and not any(
                any(ends_with_name(name, target) for target in targets or []) or config.target_parameters_of(name)
                for name in (update.module, *names)
            )
        ):
            listed = ", ".join(sorted(targets or []))
            message = f"`{update.module}`: expected a target of `{config.path}`, which are {listed}"
            raise config_mismatch_error(adapter, update.a, message)
        numbers = [part for part in update.module.split(".") if part.isdecimal()]
        is_limited = isinstance(layers, list) and not config.target_parameters_of(update.module)
        if is_limited and len(numbers) == 1 and numbers[0] not in map(str, layers or ()):
            message = f"`{update.module}`: expected one of the layers {asked} (`{config.path}`)"
            raise config_mismatch_error(adapter, update.a, message)


def require_saved_modules(adapter: Adapter, config: AdapterConfig, base: Collection[str] = ()) -> None:
    """Raise `Mismatch` if the tensors of modules or token rows that were trained in full are missing.

    `base` are the base's tensors, if it is known: PEFT ignores modules that it does not have.
    """
    whole, first = ", ".join(config.name_list_setting("modules_to_save")), next(iter(adapter.entries))
    is_asked = whole and (not base or any(is_saved_module(name, config) for name in base))
    if is_asked and not any(is_saved_module(own, config) for own in adapter.replaced_parameters):
        message = f"expected the tensors of {whole} (`modules_to_save` of `{config.path}`), found none"
        raise config_mismatch_error(adapter, first, message)
    has_rows = any(entry.kind == "tokens" for entry in adapter.entries.values())
    if config.values.get("trainable_token_indices") and not has_rows:
        message = f"expected trained token rows (`trainable_token_indices` of `{config.path}`), found none"
        raise config_mismatch_error(adapter, first, message)


def is_saved_module(parameter: str, config: AdapterConfig) -> bool:
    """Return whether `modules_to_save` lists a parameter's module. PEFT compares ends: `head` means `lm_head` too."""
    return any(f"{module}." in parameter for module in config.name_list_setting("modules_to_save"))


def check_matrix_ranks(adapter: Adapter, config: AdapterConfig, update: WeightUpdate) -> None:
    """Raise `Mismatch` if the matrices do not fit each other or have another rank than the config."""
    a, b = (adapter.specs[name].shape for name in (update.a, update.b))
    location, parameters = find_expert_place(update.module), config.target_parameters_of(update.module)
    is_deep = location is not None and len(a) == 3  # a matrix for each expert
    columns = 2 if is_deep and location is not None and location.leaf else 1
    rank_of_a = a[1 if is_deep else 0] if len(a) > 1 else 0
    if len(b) < (3 if is_deep else 2) or rank_of_a != b[columns]:
        message = f"expected a shape that fits {list(a)} of `{update.a}`, found {list(b)}"
        raise config_mismatch_error(adapter, update.b, message)
    ranks = {config.rank_of(name) for name in update.peft_lookup_names(config)}
    is_stacked = bool(parameters) and not is_deep
    if not any(rank_of_a == rank or (is_stacked and rank_of_a % rank == 0) for rank in ranks):
        raise wrong_rank_error(adapter, config, update, ranks, rank_of_a)


def wrong_rank_error(
    adapter: Adapter, config: AdapterConfig, update: WeightUpdate, ranks: Iterable[int], rank: int
) -> CkptError:
    wanted, shape = " or ".join(map(str, sorted(ranks))), list(adapter.specs[update.a].shape)
    message = f"expected rank {wanted} as in `{config.path}`, found rank {rank} (shape {shape})"
    return config_mismatch_error(adapter, update.a, message)


def config_mismatch_error(adapter: Adapter, name: str, message: str) -> CkptError:
    hint = "pass the adapter's own config with --adapter-config"
    return Mismatch(message, path=adapter.layout.path, tensor=name, hint=hint)


def trained_biases(adapter: Adapter, config: AdapterConfig, base: Mapping[str, str]) -> dict[str, str]:
    """Return the biases outside the adapter that were trained with it, mapped to their names in the adapter's file."""
    if config.bias == "none":
        return {}
    modules = set(adapter.modules)
    return {
        name: WRAPPER + name_inside_wrapper(name)
        for own, name in base.items()
        if "bias" in own and (config.bias == "all" or own.removesuffix(".bias") in modules)
    }


def embeddings_saved_in_full(adapter: Adapter, config: AdapterConfig, base: Mapping[str, str]) -> dict[str, str]:
    """Return the full embeddings that PEFT saves with an adapter that targets them, mapped to their names in its file.

    Source: `get_peft_model_state_dict`, `save_embedding_layers="auto"`.
    """
    targets, adapted = config.values.get("target_modules"), {name.rpartition(".")[2] for name in adapter.modules}
    named = set(config.name_list_setting("target_modules")) if isinstance(targets, list) else adapted
    if named.isdisjoint(_EMBEDDINGS) or config.values.get("trainable_token_indices") is not None:
        return {}
    modules = {module for module in adapter.modules if module.rpartition(".")[2] in (*_EMBEDDINGS, *_INPUTS)}
    weights = {f"{module}.weight" for module in modules}
    return {name: WRAPPER + name_inside_wrapper(name) for own, name in base.items() if own in weights}
