"""Convert the small files that a caller wants beside the weights to bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.errors import Usage
from ckptkit.formats import FormatWriter
from ckptkit.io.file import read_small, require_plain_file_name
from ckptkit.models.companions import dump_config

_LIMIT = 1 << 28  # bytes; the largest tokenizer files have tens of megabytes
_SHOWN_CHARACTERS = 40  # of a text in a message


@runtime_checkable
class Config(Protocol):
    """A configuration object, such as transformers' `PretrainedConfig`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of its JSON file."""


SmallFile = bytes | str | Mapping[str, Any] | Path | Config


def small_files_to_bytes(files: Mapping[str, SmallFile] | None, root: Path, writer: FormatWriter) -> dict[str, bytes]:
    """Return the content of each file: a `Path` is read, a dict or config becomes JSON. `root` is the destination.

    Raises `Usage` for any other value and for a name that the checkpoint's own files have, `Unsafe` for a name with
    path traversal.
    """
    for name in files or {}:
        require_plain_file_name(name, root)
        if name == MANIFEST or writer.owns_file(name):
            message = f"files[{name!r}]: the checkpoint has files of its own with such names"
            raise Usage(message, hint="use another name")
    return {name: small_file_content(name, value) for name, value in (files or {}).items()}


def small_file_content(name: str, value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        try:
            if name.endswith(".json"):
                json.loads(value)
        except (ValueError, RecursionError):  # such as a path instead of the file's content
            hint = "pass the content of the file, or its path as a `pathlib.Path`"
            raise Usage(f"files[{name!r}]: expected JSON, found {value[:_SHOWN_CHARACTERS]!r}", hint=hint) from None
        return value.encode()
    if isinstance(value, Path):
        return read_small(value.resolve(), _LIMIT)
    text = getattr(value, "to_json_string", None)  # unlike `to_dict`, it leaves out transformers' defaults
    data = json.loads(text()) if callable(text) else value.to_dict() if isinstance(value, Config) else value
    try:
        if isinstance(data, Mapping):
            return dump_config(data)
        problem = f"a {type(value).__name__}"
    except (TypeError, ValueError) as error:
        problem = f"a dict that is not JSON ({error})"
    raise Usage(f"files[{name!r}]: expected bytes, text, a path, a dict or a config, found {problem}")
