"""Companions: the small files that loaders need beside the weights (config, tokenizer, chat templates)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, IOFailure, NotACheckpoint, Unsafe, Usage, translate_os_errors
from ckptkit.formats.hf import WEIGHTS_FILE
from ckptkit.formats.json_text import not_json_error, parse_json
from ckptkit.io.file import list_children, names_in, read_small
from ckptkit.io.local_file import is_link_outside_cache
from ckptkit.io.path import hint_for_hub_id, is_remote, means_hub_model, restore_relative_path, to_model_path, to_path
from ckptkit.io.stores.hub import translate_download_errors
from ckptkit.layout import Spec
from ckptkit.trainers import companion_directories, find_step_of_path, is_training_entry_name, library_of_config
from ckptkit.trainers.trainer import ConfigOf

CONFIG = "config.json"
FILES = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
_NOT_OF_INPUTS = (CONFIG, "generation_config.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
TEMPLATES = "additional_chat_templates"
# sentence-transformers: modules after the transformer, such as pooling; each has a directory with its config
MODULES = "modules.json"
_MODULE_FILES = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json")
TOKENIZER_LIMIT = 1 << 28  # bytes; the largest tokenizer files have tens of megabytes
_CONFIG_LIMIT = 1 << 24  # bytes; a config.json has a few kilobytes


@dataclass(frozen=True, slots=True)
class Companions:
    """The content of the model files found in `found_in`, by file name, and the parsed `config` (None without one).

    `elsewhere` has the paths of tokenizer files that are in another directory, by file name. `absent` are code files
    that config.json names and that are missing beside it. `modules` are the modules after the transformer that have
    weights of their own, as in sentence-transformers. If config.json belongs to another library than transformers,
    `library` describes that library; then `config` is None, and the file is copied unchanged.
    """

    found_in: Path | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    absent: tuple[str, ...] = ()
    elsewhere: Mapping[str, Path] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    library: ConfigOf | None = None

    def source_path_of(self, name: str) -> Path:
        return self.elsewhere.get(name) or (self.found_in or Path()) / name

    def describe_sources(self) -> list[str]:
        """Return one line for each directory, with the files that were found there."""
        places: dict[Path, list[str]] = {}
        for name in self.files:
            places.setdefault(self.source_path_of(name).parent, []).append(name)
        return [f"used {', '.join(names)} from {place}" for place, names in places.items()]

    def to_files(self) -> dict[str, bytes]:
        return self.files if self.config is None else self.files | {CONFIG: dump_config(self.config)}

    @property
    def weights_stem(self) -> str:
        """Return the start of the names of weight files that loaders look for, such as "model"."""
        return "model" if self.library is None else self.library.stem


def find_companions(checkpoint: Path, base: str | None) -> Companions:
    """Return the companions in `base` (a directory, URL or Hub id) if given, else in the checkpoint or its run.

    If there is no tokenizer beside config.json, the one in the checkpoint is used.
    """
    if base is not None:
        directory = resolve_base_directory(base)
        companions = find_companions_in(directory, follow_links=True)  # the Hub's cache consists of links
        if companions is None:
            path = directory if is_remote(directory) else base
            raise NotACheckpoint("expected a model's config.json in the base, found none", path=path)
        return with_tokenizer_if_missing(companions, checkpoint)
    own = checkpoint.absolute() if checkpoint.is_dir() else checkpoint.absolute().parent
    for directory in directories_to_search(checkpoint.absolute()):
        companions = find_companions_in(restore_relative_path(checkpoint, directory))
        if companions is not None and (companions.library is None or directory == own):
            return with_tokenizer_if_missing(companions, checkpoint)
    return Companions()


def different_preprocessing_files(ours: Companions, theirs: Companions) -> list[str]:
    """Return the files that both have with other bytes and that prepare a model's inputs, such as a tokenizer."""
    names = [name for name in FILES if name not in _NOT_OF_INPUTS and name in ours.files and name in theirs.files]
    return [name for name in names if ours.files[name] != theirs.files[name]]


def with_tokenizer_if_missing(companions: Companions, checkpoint: Path) -> Companions:
    """Return companions, with the tokenizer in the checkpoint or a trainer's directory in it if they have none."""
    if companions.files.keys() & set(TOKENIZERS):
        return companions
    for directory in directories_to_search(checkpoint.absolute()):
        beside = tokenizer_paths_in(restore_relative_path(checkpoint, directory))
        if beside.keys() & set(TOKENIZERS):
            elsewhere = {name: path for name, path in beside.items() if name not in companions.files}
            files = {name: read_small(path, TOKENIZER_LIMIT) for name, path in elsewhere.items()}
            return replace(companions, files=companions.files | files, elsewhere=elsewhere)
    return companions


def directories_to_search(checkpoint: Path) -> Iterator[Path]:
    """Yield the directories to search: the checkpoint, a trainer's directory inside it, and the run above it.

    For a single file, only its own directory is searched. A parent counts as the run, or as the checkpoint that
    contains a component, only if its name or its entries say so: any other directory may contain files of another
    model.
    """
    place = checkpoint if checkpoint.is_dir() else checkpoint.parent
    yield place
    if place != checkpoint and find_step_of_path(place) is None:
        return
    folders = companion_directories()
    yield from (place / folder for folder in folders)
    above = place.parent
    if find_step_of_path(above) is not None:  # `place` is a component of a checkpoint: the run is one level further up
        yield from (above, *(above / folder for folder in folders), above.parent)
    elif find_step_of_path(place) is not None or is_training_directory(above):
        yield above


def is_training_directory(directory: Path) -> bool:
    """Return whether a directory is a training run or a checkpoint, by the names in it."""
    try:
        return any(map(is_training_entry_name, names_in(directory)))
    except PermissionError:  # a directory can be entered without the permission to list it
        return False


def find_companions_in(directory: Path, *, follow_links: bool = False) -> Companions | None:
    """Return the companions in one directory; None if it has no config.json that can belong to a model.

    Follows links only in a directory that the user named. In an unknown directory a link could point to any private
    file.
    """

    def read(name: str) -> bytes:
        return read_small((directory / name).resolve() if follow_links else directory / name, TOKENIZER_LIMIT)

    if not (directory / CONFIG).is_file():
        return None
    text = read(CONFIG)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise not_json_error(error, text, directory / CONFIG) from error
    if not isinstance(config, dict) or not config:
        return None
    if not is_transformers_config(config):
        library = library_of_config(config)
        names = [*FILES, *filter(library.loads_file, sorted(names_in(directory)))]
        files = {name: read(name) for name in names if (directory / name).is_file()}
        return Companions(directory, files, library=library)
    code = own_code_files(config)
    names, templates = [*FILES], directory / TEMPLATES
    if templates.is_dir() and (follow_links or not templates.is_symlink()):
        names += [f"{TEMPLATES}/{child.name}" for child in list_children(templates) if child.suffix == ".jinja"]
    names += [child.name for child in list_children(directory) if child.suffix == ".py"] if code else []
    modules = sentence_transformers_modules_in(directory)
    names += [*_MODULE_FILES, *(f"{module}/{CONFIG}" for module in modules)] if modules else []
    files = {name: read(name) for name in names if (directory / name).is_file()}
    suffixes = {name: {child.suffix for child in list_children(directory / name)} for name in modules}
    trained = tuple(name for name, found in suffixes.items() if found & {".safetensors", ".bin"})
    return Companions(directory, files, config, tuple(sorted(code - files.keys())), modules=trained)


def is_transformers_config(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a model of transformers, not of another library or a trainer."""
    return "model_type" in config or "architectures" in config


def find_model_config(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return the config.json of the model in a checkpoint or in the run above; None if it is missing or unreadable."""
    for directory in directories_to_search(checkpoint.absolute()):
        try:
            with translate_os_errors(directory):
                if (directory / CONFIG).is_file():
                    return read_config_json(directory / CONFIG)
        except (Corrupt, IOFailure, Unsafe):
            return None
    return None


def read_config_json(path: Path) -> Mapping[str, Any] | None:
    """Return the content of a config.json; None if it is not a JSON object. Raises `Corrupt` if it is not JSON."""
    found = parse_json(read_small(path, _CONFIG_LIMIT), path)
    return found if isinstance(found, dict) else None


def sentence_transformers_modules_in(directory: Path) -> list[str]:
    """Return the directories of modules after a transformer, as sentence-transformers' `save_pretrained` lists them."""
    if not (directory / MODULES).is_file():
        return []
    modules = parse_json(read_small(directory / MODULES, _CONFIG_LIMIT), directory / MODULES)
    paths = [one.get("path") for one in modules if isinstance(one, dict)] if isinstance(modules, list) else []
    return [
        path for path in paths if isinstance(path, str) and re.fullmatch(r"\w+", path) and (directory / path).is_dir()
    ]


def own_code_files(config: Mapping[str, Any]) -> set[str]:
    """Return the Python files with a model's own code that `auto_map` in config.json names, expected beside it.

    Source: transformers/dynamic_module_utils.py. A class is `module.Class`, or `repository--module.Class` elsewhere.
    """
    auto_map = config.get("auto_map")
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    classes = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return {f"{name.split('.')[0]}.py" for name in classes if isinstance(name, str) and "--" not in name}


def resolve_base_directory(base: str) -> Path:
    """Return the directory that `base` names; for a Hub id, the cache, into which missing companions are downloaded."""
    if "://" in base:
        return to_path(base)
    if Path(base).is_dir():
        return Path(base)
    if not means_hub_model(base):
        hint = f"pass the directory `{Path(base).parent}`" if Path(base).is_file() else hint_for_hub_id(base)
        raise Usage(f"expected a directory or a Hub id like `org/model`, found `{base}`", hint=hint)
    if "@" in base:
        return to_model_path(base)
    from huggingface_hub import snapshot_download

    with translate_download_errors(base):
        return Path(snapshot_download(base, allow_patterns=[*FILES, f"{TEMPLATES}/*.jinja", "*.py"]))


def with_weights_dtype(config: Mapping[str, Any], specs: Iterable[Spec]) -> dict[str, Any]:
    """Return a config with the dtype of most bytes of the weights, and architectures without FSDP1's prefix."""
    described = dict(config)
    nbytes: Counter[str] = Counter()
    for spec in specs:
        if spec.dtype.kind == "float":
            nbytes[spec.dtype.name] += spec.nbytes
    if nbytes:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        described[key] = nbytes.most_common(1)[0][0]
    if isinstance(config.get("architectures"), list):
        described["architectures"] = [str(name).removeprefix("FSDP") for name in config["architectures"]]
    return described


def dump_config(config: Mapping[str, Any]) -> bytes:
    """Return the bytes of a config.json as transformers writes it.

    Leaves out the name of a file with weights: loaders would look for it beside the new files.
    """
    written = {key: value for key, value in config.items() if key != WEIGHTS_FILE}
    text = json.dumps(written, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # write a lone surrogate as its JSON escape


def tokenizer_paths_in(checkpoint: Path) -> dict[str, Path]:
    """Return a checkpoint's tokenizer files by name. Skips links out of the Hub's cache: they may point anywhere."""
    place = checkpoint if checkpoint.is_dir() else checkpoint.parent
    paths = {name: place / name for name in FILES if name not in _NOT_OF_INPUTS}
    return {name: path for name, path in paths.items() if path.is_file() and not is_link_outside_cache(path)}
