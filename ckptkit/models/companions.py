"""Companions: the small files that make weights a model (config, tokenizer, chat templates)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, IOFailure, NotACheckpoint, Unsafe, Usage, translate_os_errors
from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import children, names_in, read_small
from ckptkit.io.local import is_strange_link
from ckptkit.io.path import hint_on_id, is_model_id, spelled_like, to_model_path, to_path
from ckptkit.io.stores.hub import downloading
from ckptkit.layout import Spec
from ckptkit.trainers import companion_folders, config_of, has_name_of_training, step_of
from ckptkit.trainers.trainer import ConfigOf

CONFIG = "config.json"
FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
TEMPLATES = "additional_chat_templates"
# of sentence-transformers: the modules after the transformer, such as pooling, each with a directory for its config
MODULES = "modules.json"
_OF_MODULES = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json")
TOKENIZER_LIMIT = 1 << 28  # bytes; the largest tokenizers have a few ten million
_CONFIG_LIMIT = 1 << 24  # bytes of a config.json of which little is asked


@dataclass(frozen=True, slots=True)
class Companions:
    """The small files found in `found_in`, by name, as bytes; `config` parsed, None if there is none.

    `beside` are the files of a tokenizer that were found elsewhere, by name. `absent` are files with code that
    config.json names and that do not lie beside it. `modules` are the modules after the transformer that have weights
    of their own, as in sentence-transformers. `library` is whose config.json it is, if not transformers': then `config`
    is None, and the file is copied unchanged.
    """

    found_in: Path | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    absent: tuple[str, ...] = ()
    beside: Mapping[str, Path] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    library: ConfigOf | None = None

    def path_of(self, name: str) -> Path:
        """Return where one of the files was found."""
        return self.beside.get(name) or (self.found_in or Path()) / name

    def describe(self) -> list[str]:
        """Return for each directory which files were found in it."""
        places: dict[Path, list[str]] = {}
        for name in self.files:
            places.setdefault(self.path_of(name).parent, []).append(name)
        return [f"used {', '.join(names)} from {place}" for place, names in places.items()]

    def to_files(self) -> dict[str, bytes]:
        """Return the files as they will be written, by name."""
        return self.files if self.config is None else self.files | {CONFIG: dump_config(self.config)}

    @property
    def stem(self) -> str:
        """Return how the names of the files begin that loaders look for."""
        return "model" if self.library is None else self.library.stem


def find_companions(checkpoint: Path, base: str | None) -> Companions:
    """Return the companions in `base`, a directory, URL or Hub id, if given; else in the checkpoint or the run.

    A tokenizer that lies in the checkpoint is among them if there is none beside the config.json.
    """
    if base is not None:
        found = read_companions(resolve_base(base), follow_links=True)  # the Hub's cache is made of links
        if found is None:
            raise NotACheckpoint("expected a model's config.json in the base, found none", path=base)
        return with_tokenizer(found, checkpoint)
    own = checkpoint.absolute() if checkpoint.is_dir() else checkpoint.absolute().parent
    for place in places_of(checkpoint.absolute()):
        found = read_companions(spelled_like(checkpoint, place))
        if found is not None and (found.library is None or place == own):
            return with_tokenizer(found, checkpoint)
    return Companions()


def with_tokenizer(found: Companions, checkpoint: Path) -> Companions:
    """Return companions with the tokenizer in the checkpoint or a trainer's folder there, if they have none."""
    if found.files.keys() & set(TOKENIZERS):
        return found
    for place in places_of(checkpoint.absolute()):
        beside = tokenizer_beside(spelled_like(checkpoint, place))
        if beside.keys() & set(TOKENIZERS):
            files = {
                name: read_small(path, TOKENIZER_LIMIT) for name, path in beside.items() if name not in found.files
            }
            return replace(found, files=found.files | files, beside={name: beside[name] for name in files})
    return found


def places_of(checkpoint: Path) -> Iterator[Path]:
    """Yield where companions may lie: in the checkpoint, in a trainer's directory in it, and in the run above.

    A file by itself has only the directory that it lies in. A directory counts as the run above, or as the checkpoint
    that a directory is a component of, only if names say so. Anything else there may belong to another model.
    """
    place = checkpoint if checkpoint.is_dir() else checkpoint.parent
    yield place
    if place != checkpoint and step_of(place) is None:
        return
    folders = companion_folders()
    yield from (place / folder for folder in folders)
    above = place.parent
    if step_of(above) is not None:  # a component of a checkpoint: the run is one further up
        yield from (above, *(above / folder for folder in folders), above.parent)
    elif step_of(place) is not None or is_of_training(above):
        yield above


def is_of_training(folder: Path) -> bool:
    """Return whether a directory is a run or a checkpoint of a training, by the names in it."""
    try:
        return any(map(has_name_of_training, names_in(folder)))
    except PermissionError:  # one may enter a directory without the right to list it
        return False


def read_companions(place: Path, *, follow_links: bool = False) -> Companions | None:
    """Return the companions in one directory, None if it has no config.json that can be one of a model.

    Links are followed only in a directory that the user vouches for: a stranger's may lead to any file of ours.
    """

    def read(name: str) -> bytes:
        return read_small((place / name).resolve() if follow_links else place / name, TOKENIZER_LIMIT)

    if not (place / CONFIG).is_file():
        return None
    try:
        config = json.loads(read(CONFIG))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not valid JSON ({error})", path=place / CONFIG) from error
    if not isinstance(config, dict) or not config:
        return None
    if not ("model_type" in config or "architectures" in config):
        files = {name: read(name) for name in FILES if (place / name).is_file()}
        return Companions(place, files, library=config_of(config))
    code = code_files(config)
    names = [*FILES, *templates_in(place, follow_links=follow_links), *(python_in(place) if code else ())]
    modules = modules_in(place)
    names += [*_OF_MODULES, *(f"{module}/{CONFIG}" for module in modules)] if modules else []
    files = {name: read(name) for name in names if (place / name).is_file()}
    trained = tuple(name for name in modules if any(map(is_weights, children(place / name))))
    return Companions(place, files, config, tuple(sorted(code - files.keys())), modules=trained)


def find_config(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return the config.json of the model in a checkpoint or in the run above; None if none there can be read."""
    for place in places_of(checkpoint.absolute()):
        try:
            with translate_os_errors(place):
                if (place / CONFIG).is_file():
                    return read_config(place / CONFIG)
        except (Corrupt, IOFailure, Unsafe):
            return None
    return None


def read_config(path: Path) -> Mapping[str, Any] | None:
    """Return what a config.json says, None if it is no object. Raises `Corrupt` if it is no JSON."""
    found = parse_json(read_small(path, _CONFIG_LIMIT), path)
    return found if isinstance(found, dict) else None


def templates_in(place: Path, *, follow_links: bool) -> list[str]:
    """Return the chat templates that transformers puts beside the main one, as names in directory `place`."""
    folder = place / TEMPLATES
    if not folder.is_dir() or (folder.is_symlink() and not follow_links):
        return []
    return [f"{TEMPLATES}/{child.name}" for child in children(folder) if child.suffix == ".jinja"]


def modules_in(place: Path) -> list[str]:
    """Return the directories of the modules after the transformer, in a model of sentence-transformers; [] in others.

    Source: `save_pretrained` in sentence_transformers/base/model.py.
    """
    if not (place / MODULES).is_file():
        return []
    found = parse_json(read_small(place / MODULES, _CONFIG_LIMIT), place / MODULES)
    paths = [one.get("path") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [path for path in paths if isinstance(path, str) and re.fullmatch(r"\w+", path) and (place / path).is_dir()]


def is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin")


def python_in(place: Path) -> list[str]:
    return [child.name for child in children(place) if child.suffix == ".py"]


def code_files(config: Mapping[str, Any]) -> set[str]:
    """Return the files with a model's own code that `auto_map` in config.json names, which lie beside it.

    Source: transformers/dynamic_module_utils.py. A class is `module.Class`, or `repository--module.Class` elsewhere.
    """
    found = config.get("auto_map")
    values = found.values() if isinstance(found, dict) else ()
    classes = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return {f"{name.split('.')[0]}.py" for name in classes if isinstance(name, str) and "--" not in name}


def resolve_base(base: str) -> Path:
    """Return the directory that `base` names: itself, or a Hub repository's companions, downloaded or cached."""
    if "://" in base:
        return to_path(base)
    if Path(base).is_dir():
        return Path(base)
    if not is_model_id(base):
        hint = f"pass the directory `{Path(base).parent}`" if Path(base).is_file() else hint_on_id(base)
        raise Usage(f"expected a directory or a Hub id like `org/model`, found `{base}`", hint=hint)
    if "@" in base:
        return to_model_path(base)
    from huggingface_hub import snapshot_download

    with downloading(base):
        return Path(snapshot_download(base, allow_patterns=[*FILES, f"{TEMPLATES}/*.jinja", "*.py"]))


def describe_weights(config: Mapping[str, Any], specs: Iterable[Spec], dtype: str | None = None) -> dict[str, Any]:
    """Return a config with the dtype that most bytes of the weights have, and architectures without FSDP1's prefix.

    A `dtype` that is given takes its place.
    """
    described = dict(config)
    nbytes: Counter[str] = Counter()
    for spec in specs:
        if spec.dtype.kind == "float":
            nbytes[spec.dtype.name] += spec.nbytes
    if nbytes:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        described[key] = dtype or nbytes.most_common(1)[0][0]
    if isinstance(config.get("architectures"), list):
        described["architectures"] = [str(name).removeprefix("FSDP") for name in config["architectures"]]
    return described


def dump_config(config: Mapping[str, Any]) -> bytes:
    """Return a config.json as transformers writes it."""
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes the escape that JSON has for it


def tokenizer_beside(checkpoint: Path) -> dict[str, Path]:
    """Return the files of a tokenizer that lie in a checkpoint, by name; no links, which may lead anywhere."""
    place = checkpoint if checkpoint.is_dir() else checkpoint.parent
    names = [name for name in FILES if name not in (CONFIG, "generation_config.json")]
    return {name: place / name for name in names if is_regular(place / name)}


def is_regular(path: Path) -> bool:
    """Return whether a file lies at a path itself, or a link to a blob in the same cache of the Hub."""
    return path.is_file() and not is_strange_link(path)
