"""Digests of tensors by the names that formats of deltas give them."""

from __future__ import annotations

import hashlib
import zlib
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from ckptkit.errors import Unsupported

_PACKAGES = {"xxh3-128": ("xxhash", "xxh3_128"), "blake3": ("blake3", "blake3")}
ADLER, XXH3, BLAKE3, SHA256 = "adler32", "xxh3-128", "blake3", "sha256"


class Digest(Protocol):
    """A digest of bytes that come one after another."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all of them."""


class Adler32:
    """The checksum of zlib, in eight hexadecimal digits."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def best_algorithm() -> str:
    """Return the algorithm to write with: xxh3-128 where the package xxhash is installed."""
    return XXH3 if find_spec("xxhash") else ADLER


def new_digest(algorithm: str) -> Digest:
    """Return an empty digest. Raises `Unsupported` for one that is not known, or that needs a package."""
    if algorithm == ADLER:
        return Adler32()
    if algorithm == SHA256:
        return hashlib.sha256()
    if algorithm in _PACKAGES:
        module, name = _PACKAGES[algorithm]
        try:
            return cast(Digest, getattr(import_module(module), name)())
        except ImportError as error:
            hint = f"run `pip install {module}`"
            raise Unsupported(f"digests of `{algorithm}` need the package `{module}`", hint=hint) from error
    hint = f"ckptkit knows {ADLER}, {XXH3}, {BLAKE3} and {SHA256}"
    raise Unsupported(f"unknown digest `{algorithm}`", hint=hint)
