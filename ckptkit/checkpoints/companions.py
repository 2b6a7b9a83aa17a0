"""Companions: config, tokenizer and the other small files that make weights a model; found, and the config mended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.runs import step_of
from ckptkit.errors import Corrupt, NotACheckpoint, Usage
from ckptkit.files.file import read_small
from ckptkit.files.path import to_path
from ckptkit.layout import Spec

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
)
_LIMIT = 1 << 28  # bytes; the largest tokenizers have a few ten million


@dataclass(frozen=True, slots=True)
class Companions:
    """The small files found in `found_in`, by name, as bytes; `config` parsed, None if there is none."""

    found_in: Path | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    config: dict[str, Any] | None = None


def find_companions(checkpoint: Path, base: str | None) -> Companions:
    """The companions in `base` (a directory, URL or Hub id) if given, else in the checkpoint or the run above."""
    if base is not None:
        found = read_companions(resolve_base(base), follow_links=True)  # the Hub's cache is made of links
        if found is None:
            raise NotACheckpoint("no config.json of a model in the base", path=base)
        return found
    for place in places_of(checkpoint.absolute()):
        found = read_companions(place)
        if found is not None:
            return found
    return Companions()


def places_of(checkpoint: Path) -> Iterator[Path]:
    """Where companions are looked for: in the checkpoint and in the run above it, in verl's `huggingface/` of each."""
    place = checkpoint if checkpoint.is_dir() else checkpoint.parent
    levels = [place, place.parent]
    if step_of(place.parent) is not None:  # a part of a checkpoint: the run is one further up
        levels.append(place.parent.parent)
    for level in levels:
        yield level
        yield level / "huggingface"


def read_companions(place: Path, *, follow_links: bool = False) -> Companions | None:
    """The companions in one directory, None if it has no config.json that names a model.

    Links are followed only in a directory that the user vouches for: a stranger's may lead to any file of ours.
    """

    def read(name: str) -> bytes:
        return read_small((place / name).resolve() if follow_links else place / name, _LIMIT)

    if not (place / CONFIG).is_file():
        return None
    try:
        config = json.loads(read(CONFIG))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not valid JSON ({error})", path=place / CONFIG) from error
    if not isinstance(config, dict) or not ("model_type" in config or "architectures" in config):
        return None
    files = {name: read(name) for name in FILES if (place / name).is_file()}
    return Companions(place, files, config)


def resolve_base(base: str) -> Path:
    """The directory that `base` names: itself, or the companions of a Hub repository, downloaded or from the cache."""
    if "://" in base:
        return to_path(base)
    if Path(base).is_dir():
        return Path(base)
    if base.startswith((".", "/")) or base.count("/") != 1:
        raise Usage(f"`{base}` is neither a directory nor a Hub id like `org/model`")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base, allow_patterns=list(FILES)))
    except Exception as error:  # the hub raises its own, its HTTP client's and the system's
        raise Usage(f"the Hub gave no `{base}`: {error}", hint="check the id, or give a local directory") from error


def mend_config(config: dict[str, Any], specs: Iterable[Spec]) -> bytes:
    """`config.json` with the dtype that the weights really have, and architectures without FSDP1's prefix."""
    mended = dict(config)
    nbytes: Counter[str] = Counter()
    for spec in specs:
        if spec.dtype.kind == "float":
            nbytes[spec.dtype.name] += spec.nbytes
    if nbytes:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        mended[key] = nbytes.most_common(1)[0][0]
    if isinstance(config.get("architectures"), list):
        mended["architectures"] = [str(name).removeprefix("FSDP") for name in config["architectures"]]
    text = json.dumps(mended, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes the escape that JSON has for it
