"""Build a transformers model without memory (on the meta device), to get its tensors.

Runs no code of the model's author. Only the classes of the installed transformers are used; code beside a config.json
never runs. Importing transformers takes seconds, so it is used only for model types that ckptkit has no table for.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.layout.box import Shape

OLDEST = (5, 16)  # oldest version that passes the tests; keep equal to pyproject.toml
# keys that could load code, or that change tensors in ways that no table of names describes
_DROPPED_KEYS = re.compile(r"_.*|.*_implementation|.*kernel.*config.*|auto_map|torch_dtype|dtype")
_FLOAT = "__float__"  # transformers' encoding of numbers that JSON lacks (infinity)
_LAYERS = re.compile(r".*(layers?|blocks|depths?|stages)")
_EXPERTS = re.compile(r".*experts.*")
_MAX_LAYERS, _MAX_LAYERS_TIMES_EXPERTS = 2_000, 1 << 20  # ten times more than any model: limits a malicious config
_MIXTURE = ".experts"  # suffix of module names with fused experts
_MAPPINGS = (
    *("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    *("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_MAPPING"),
)


class UnknownType(Unsupported):
    """A model type or class that transformers does not have: it has code, and perhaps names, of its own."""


class NotInstalled(Unsupported):
    """transformers or torch is missing, or transformers is too old or cannot be imported."""


class NotBuilt(Unsupported):
    """A model type that transformers has, with a config.json from which it cannot build a model."""


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A model on the meta device, and the shapes that its tensors have in memory.

    `parameters` are the names of the parameters that are not tied to another, in the model's order. `tied` maps tensors
    that are not saved to the tensors that they equal; `unsaved` are never saved. `in_fp32` are patterns of the names of
    tensors that loaders keep in fp32, by the dtype of the other tensors.
    """

    model: Any
    shapes: Mapping[str, Shape]
    parameters: tuple[str, ...]
    tied: Mapping[str, str]
    unsaved: frozenset[str]
    in_fp32: Mapping[str, re.Pattern[str] | None]


def find_meta_model(config: Mapping[str, Any]) -> MetaModel:
    """Return the model that a config.json describes. Raises `Unsupported` if transformers does not know it."""
    if config.get("quantization_config"):
        raise Unsupported("the tensors are quantized, so their names were not compared")
    try:
        text = json.dumps(config, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"transformers does not accept its config.json: {error}") from error
    return build_meta_model(text)


@cache
def build_meta_model(config_json: str) -> MetaModel:
    config = sanitized_config(json.loads(config_json))
    model_type = str(config.get("model_type"))
    try:
        transformers = import_transformers()
    except NotInstalled as error:
        error.message = f"only transformers knows models of type `{model_type}`: {error.message}"
        raise
    import torch

    layers, experts = (max([1, *numbers_under_keys(config, pattern)]) for pattern in (_LAYERS, _EXPERTS))
    if layers > _MAX_LAYERS or layers * experts > _MAX_LAYERS_TIMES_EXPERTS:
        raise Unsupported(f"its config.json says {layers:.6g} layers, and {experts:.6g} experts")
    try:
        with quiet_transformers(), torch.device("meta"):
            model = model_class_of(transformers, config)(config_class(transformers, model_type).from_dict(config))
            shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    except UnknownType as error:
        message = f"transformers {transformers.__version__} does not have {error.message}"
        raise UnknownType(message, hint="pip install --upgrade transformers") from error
    except Exception as error:  # transformers' own model code may raise anything
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        reason = f"transformers {transformers.__version__} cannot build a model of type `{model_type}`: {first}"
        raise NotBuilt(reason) from error
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    declared = getattr(model, "all_tied_weights_keys", None)
    ties = declared if isinstance(declared, Mapping) else {}
    return MetaModel(
        model=model,
        shapes=shapes,
        parameters=tuple(name for name, _ in model.named_parameters()),
        tied={target: source for target, source in ties.items() if target in shapes and source in shapes},
        unsaved=frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ()),
        in_fp32={
            "bfloat16": regex_for_globs(strict),
            "float16": regex_for_globs([*strict, *(getattr(model, "_keep_in_fp32_modules", None) or ())]),
        },
    )


def find_config_with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a config.json with all defaults of transformers, and its own class names; None if it cannot be loaded."""
    try:
        kind = config_class(import_transformers(), str(config.get("model_type")))
        with quiet_transformers():
            full = kind.from_dict(sanitized_config(dict(config))).to_dict()
    except Exception:  # noqa: BLE001 - transformers' own code may raise anything, and then the keys are what they are
        return None
    return {**full, **{key: config.get(key) for key in ("architectures", "auto_map")}}


def import_transformers() -> Any:
    """Return the module transformers. Raises `NotInstalled` if it cannot be used, or torch is missing."""
    if missing := find_missing_model_package():
        raise NotInstalled(f"{missing} is not installed", hint="pip install 'ckptkit-fsdp[hf]'")
    upgrade = "pip install --upgrade 'ckptkit-fsdp[hf]'"
    try:
        import transformers
    except ImportError as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise NotInstalled(f"transformers cannot be imported: {reason}", hint=upgrade) from error
    if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        message = f"expected transformers {oldest} or newer, found {transformers.__version__}"
        raise NotInstalled(message, hint=upgrade)
    return transformers


def config_class(transformers: Any, model_type: str) -> Any:
    """Return the config class of a model type. Raises `UnknownType` if there is none."""
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnknownType(f"models of type `{model_type}`")
    return transformers.CONFIG_MAPPING[model_type]


def model_class_of(transformers: Any, config: Mapping[str, Any]) -> Any:
    """Return the model class that a config names, or else the class of its type. Raises `UnknownType` without one."""
    named = [str(name).removeprefix("FSDP") for name in config.get("architectures") or ()]
    if model := find_first_model_class(transformers, named, transformers):
        return model
    kind = config_class(transformers, str(config.get("model_type")))
    if model := find_first_model_class(transformers, named, modeling_module_of(kind)):
        return model
    mappings = [getattr(transformers, name) for name in _MAPPINGS]
    classes = [mapping[kind] for mapping in mappings if kind in mapping]
    if named or not classes:
        raise UnknownType(f"class `{named[0]}`" if named else f"model for the config of a `{config['model_type']}`")
    return classes[0]


def model_class_names_of(config: Mapping[str, Any]) -> list[str]:
    """Return the names of all model classes for the type of a config.json; [] if transformers does not have it."""
    try:
        transformers = import_transformers()
        kind = config_class(transformers, str(config.get("model_type")))
    except Unsupported:
        return []
    module = modeling_module_of(kind)
    names = [name for name, one in vars(module).items() if getattr(one, "__module__", None) == module.__name__]
    models = {name: find_first_model_class(transformers, [name], module) for name in names}
    return [name for name, model in models.items() if model is not None and model.config_class is kind]


def find_first_model_class(transformers: Any, names: Iterable[str], module: Any) -> Any:
    """Return the first model class of these names in a module; None if there is none."""
    classes = [member for name in names if isinstance(member := getattr(module, name, None), type)]
    return next((member for member in classes if issubclass(member, transformers.PreTrainedModel)), None)


def modeling_module_of(config_class: Any) -> Any:
    """Return the module that defines the models of a config class (with classes that are not exported), or None."""
    try:
        return import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:  # a few models need another library
        return None


def regex_for_globs(globs: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of the globs, as transformers' `build_glob_alternation` does; None without globs."""
    return re.compile("|".join(glob.replace("*", ".*") for glob in sorted(globs))) if globs else None


def is_quantizable_by_linear_module(meta: MetaModel) -> dict[str, bool]:
    """Return the modules that are linear layers or experts, and whether transformers would quantize each.

    Source: transformers/quantizers/base.py, `get_modules_to_not_convert`, and
    transformers/integrations/finegrained_fp8.py, `replace_with_fp8_linear`.
    """
    from torch import nn
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    with quiet_transformers():
        kept = [*get_keys_to_not_convert(meta.model), *(getattr(meta.model, "_keep_in_fp32_modules", None) or ())]
    return {
        name: should_convert_module(name, kept)
        for name, module in meta.model.named_modules()
        if type(module) is nn.Linear or name.endswith(_MIXTURE)
    }


def sanitized_config(config: Any) -> Any:
    """Return a config without keys that could load code, and without dtypes, at any depth; decodes infinite numbers."""
    if isinstance(config, dict):
        if config.keys() == {_FLOAT}:
            return float(config[_FLOAT])
        return {key: sanitized_config(value) for key, value in config.items() if not _DROPPED_KEYS.fullmatch(str(key))}
    return [sanitized_config(one) for one in config] if isinstance(config, list) else config


def numbers_under_keys(config: Any, pattern: re.Pattern[str]) -> Iterator[float]:
    """Yield the numbers in a config whose key matches a pattern, at any depth."""
    for key, value in config.items() if isinstance(config, dict) else ():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int | float) and pattern.fullmatch(str(key)):
                yield item
            yield from numbers_under_keys(item, pattern)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress warnings of transformers inside the block: they concern models that will run."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def find_missing_model_package() -> str | None:
    """Return the package that is missing for building models, "transformers" or "torch"; None if both are installed."""
    return next((package for package in ("transformers", "torch") if find_spec(package) is None), None)
