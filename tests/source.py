"""The source of ckptkit as syntax trees, which tests of one process parse once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import ckptkit

PACKAGE = Path(ckptkit.__file__).parent
PATHS = tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module, itself first."""
    return tuple(ast.walk(ast.parse(path.read_text(), path)))
