"""Parse JSON from untrusted files, strictly."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptkit.errors import RESTORE, CkptError, Corrupt
from ckptkit.io.file import find_missing_content_error


def parse_json(data: bytes, path: Path) -> Any:
    """Return the JSON value in `data`, of file `path`. Raises `Corrupt` for invalid JSON or a key that occurs twice."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=dict_with_unique_keys)
    except CkptError as error:
        raise error.blame(path=path) from None
    except (ValueError, RecursionError) as error:
        raise not_json_error(error, data, path) from error


def not_json_error(error: Exception, data: bytes, path: Path) -> Corrupt:
    return find_missing_content_error(data[:512], path) or Corrupt(f"not valid JSON ({error})", path=path, hint=RESTORE)


def dict_with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises `Corrupt` if two of its keys are equal."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = sorted(name for name, _ in pairs)
        raise Corrupt("the key occurs twice", tensor=next(a for a, b in pairwise(names) if a == b))
    return value
