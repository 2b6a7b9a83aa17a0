"""Copy the package without some of its plugins: their folders, and their lines in the tables of the core.

python -m tests.entry_points.without_plugins DST [NAME ...]      without NAME alone; without any if none is named
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.stem for path in (ROOT / "ckptkit" / "plugins").iterdir() if not path.name.startswith("_"))


class Remove(ast.NodeTransformer):
    """Removes from literal tables what names a module of the plugins."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def is_of_plugin(self, node: ast.AST | None) -> bool:
        """Return whether a node is a string that names a module of a plugin, or a call with such an argument."""
        if isinstance(node, ast.Call):
            return any(map(self.is_of_plugin, node.args))
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            return False
        match = re.match(r"(?:ckptkit\.)?plugins\.(\w+)", node.value)
        return match is not None and match[1] in self.names

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        items = zip(node.keys, node.values, strict=True)
        kept = [(key, value) for key, value in items if not (self.is_of_plugin(key) or self.is_of_plugin(value))]
        node.keys, node.values = [key for key, _ in kept], [value for _, value in kept]
        self.generic_visit(node)
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        node.elts = [one for one in node.elts if not self.is_of_plugin(one)]
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if ast.unparse(node.func) == "dict.fromkeys" and any(map(self.is_of_plugin, node.args)):
            return ast.Dict([], [])
        node.keywords = [one for one in node.keywords if not self.is_of_plugin(one.value)]
        self.generic_visit(node)
        return node


def copy_without(names: frozenset[str], dst: Path) -> None:
    """Copy the package and its tests to `dst`, without the plugins of these names and their tests."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ckptkit", dst / "ckptkit", ignore=skipped)
    shutil.copytree(ROOT / "tests", dst / "tests", ignore=skipped)
    shutil.copytree(ROOT / "scripts", dst / "scripts", ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", dst)
    for name in names:
        for folder in (dst / "ckptkit" / "plugins", dst / "tests" / "plugins"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / f"{name}.py").unlink(missing_ok=True)
    for path in (dst / "ckptkit").rglob("*.py"):
        text = path.read_text()
        if not any(f"ckptkit.plugins.{name}" in text for name in names):
            continue
        path.write_text(ast.unparse(Remove(names).visit(ast.parse(text))))


if __name__ == "__main__":
    copy_without(frozenset(sys.argv[2:] or PLUGINS), Path(sys.argv[1]))
