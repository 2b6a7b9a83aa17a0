"""Write the fields of results and the keys of `--json`, for docs/results.md.

The fields come from the dataclasses. The keys come from the source of the functions that print them: an expression
that makes a dict has the keys of its literals, of `pick`, and of the functions that it calls.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import abc, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from importlib import import_module
from textwrap import dedent, fill
from types import UnionType
from typing import Any, get_args, get_origin

import ckptkit
from ckptkit.cli.commands import COMMANDS
from ckptkit.cli.output import pick, print_json, to_json_value
from ckptkit.errors import CkptError
from ckptkit.plugins.deltas.kind import show_description
from scripts.markdown import WIDTH, paragraph

# What an expression makes: the keys of a dict with what each holds, a list of it, or None for a plain value.
Shape = dict[str, Any] | list[Any] | None
PUBLIC = {name: getattr(ckptkit, name) for name in ckptkit.__all__}


def write_json() -> str:
    """Return the keys of the JSON of every command."""
    commands = defaultdict(list)
    commands[spell_shape({"error": returned_by(CkptError.to_json)})] = ["Every command, if it fails"]
    for name, known in COMMANDS.own.items():
        for shape in printed_by(load_function(known.where)):
            commands[spell_shape(shape)].append(f"`{name}`")
    commands[spell_shape(next(printed_by(show_description)))].append("`inspect` of a delta")
    return "\n".join(
        fill(f"- {', '.join(names)}: `{text}`", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for text, names in commands.items()
    )


def write_fields() -> str:
    """Return the result classes: what each is, the functions that return it, its fields and its properties."""
    users = defaultdict(list)
    for name in ckptkit.__all__:
        if inspect.isfunction(function := getattr(ckptkit, name)):
            for word in re.findall(r"\w+", str(inspect.signature(function).return_annotation)):
                users[word].append(f"[`{name}`](python.md#{name})")
    classes = {name: getattr(ckptkit, name) for name in ckptkit.__all__ if name in users and name[0].isupper()}
    return "\n\n".join(write_result(name, holder, users[name]) for name, holder in sorted(classes.items()))


def write_result(name: str, holder: Any, functions: list[str]) -> str:
    """Return the section of a result class."""
    listed = [f"`{field.name}: {field.type}`" for field in fields(holder) if not field.name.startswith("_")]
    properties = [
        f"`{key}: {inspect.signature(value.fget).return_annotation}`"
        for key, value in vars(holder).items()
        if isinstance(value, property) and value.fget and not key.startswith("_")
    ]
    return "\n\n".join(
        [
            f"### {name}",
            *(paragraph(part).strip() for part in (inspect.getdoc(holder) or "").split("\n\n")),
            paragraph(f"From {', '.join(functions)}. Fields: {', '.join(listed)}.").strip(),
            *([paragraph(f"Properties: {', '.join(properties)}.").strip()] if properties else []),
        ]
    )


def load_function(where: str) -> Callable[..., Any]:
    """Return the function at `module:name`."""
    module, _, name = where.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def printed_by(function: Callable[..., Any], depth: int = 2) -> Iterator[Shape]:
    """Yield what a function prints as JSON, itself or through the functions of ckptkit that it calls."""
    scope = Scope.of(function)
    for call in scope.calls():
        called = scope.find(call.func)
        if called is print_json:
            yield scope.shape(call.args[0])
        elif inspect.isfunction(called) and depth and any(keyword.arg == "json" for keyword in call.keywords):
            yield from printed_by(called, depth - 1)


@dataclass(frozen=True, slots=True)
class Scope:
    """The source of a function, and the names that it can use."""

    tree: ast.Module
    names: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Scope:
        """Return the scope of a function."""
        function = inspect.unwrap(function)
        tree = ast.parse(dedent(inspect.getsource(function)))
        imported = {
            alias.asname or alias.name: getattr(import_module(node.module), alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        return cls(
            tree, {**function.__globals__, **imported, function.__name__: None}
        )  # None: a function that recurses

    def calls(self) -> Iterator[ast.Call]:
        """Yield every call."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def find(self, node: ast.expr) -> Any:
        """Return the global object that a name means, None for anything else."""
        return self.names.get(node.id) if isinstance(node, ast.Name) else None

    def shape(self, node: ast.expr) -> Shape:
        """Return what an expression makes."""
        shape: Shape = None
        match node:
            case ast.Dict(keys, values):
                shape = self.of_dict(keys, values)
            case ast.DictComp(_, value, [ast.comprehension(_, source)]):
                shape = dict.fromkeys(first_words(source) or ["..."], self.shape(value))
            case ast.BinOp(left, ast.BitOr(), right):
                shape = join(self.shape(left), self.shape(right))
            case ast.IfExp(_, body, other):
                shape = join(self.shape(body), self.shape(other))
            case ast.ListComp(item) | ast.GeneratorExp(item):
                shape = [self.shape(item)]
            case ast.Call():
                shape = self.of_call(node)
            case ast.Name(name):
                shape = self.of_name(name)
        return shape_of_type(self.type_of(node)) if shape is None else shape

    def of_dict(self, keys: list[ast.expr | None], values: list[ast.expr]) -> Shape:
        """Return the shape of a literal; `**x` adds the keys of x."""
        shape: Shape = {}
        for key, value in zip(keys, values, strict=True):
            if key is None:
                shape = join(shape, self.shape(value))
            elif isinstance(key, ast.Constant):
                shape = join(shape, {str(key.value): self.shape(value)})
        return shape

    def of_call(self, node: ast.Call) -> Shape:
        """Return what a call returns: `pick`, `list` and `map`, `to_json_value`, or a function of ckptkit."""
        called = self.find(node.func)
        match node:
            case ast.Call(ast.Name("list" | "sorted" | "tuple"), [item]):
                return self.shape(item)
            case ast.Call(ast.Name("map"), [function, _]):
                return [returned_by(self.find(function))]
            case ast.Call(ast.Attribute(holder, "to_json")):
                return returned_by(getattr(without_none(self.type_of(holder)), "to_json", None))
        if called is pick:
            types = members_of(self.type_of(node.args[0]))
            return {name: shape_of_type(types.get(name)) for word in node.args[1:] for name in self.words(word)}
        if called is to_json_value:
            return self.shape(node.args[0]) or {"...": None}
        return returned_by(called) if inspect.isfunction(called) else None

    def of_name(self, name: str) -> Shape:
        """Return the shape of a local variable: all that is assigned to it, or to its keys."""
        shape: Shape = None
        for node in ast.walk(self.tree):
            match node:
                case (
                    ast.Assign([ast.Name(target)], value)
                    | ast.AnnAssign(ast.Name(target), _, ast.expr() as value)
                    | ast.AugAssign(ast.Name(target), _, value)
                ):
                    shape = join(shape, self.shape(value)) if target == name else shape
                case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                    for each, value in zip(targets, values, strict=True):
                        shape = join(shape, self.shape(value)) if ast.unparse(each) == name else shape
                case ast.Assign([ast.Subscript(ast.Name(target), ast.Constant(key))], value):
                    shape = join(shape, {str(key): self.shape(value)}) if target == name else shape
        return shape

    def type_of(self, node: ast.expr) -> Any:
        """Return the type of a variable or attribute, None if the annotations do not tell."""
        if isinstance(node, ast.Attribute):
            return members_of(self.type_of(node.value)).get(node.attr)
        return next(self.types_of(node), None) if isinstance(node, ast.Name) else None

    def types_of(self, node: ast.Name) -> Iterator[Any]:
        """Yield the type of a variable from each place that sets it."""
        for each in ast.walk(self.tree):
            match each:
                case ast.arg(node.id, ast.expr() as annotation) | ast.AnnAssign(ast.Name(node.id), annotation):
                    yield evaluate(ast.unparse(annotation), self.names)
                case ast.Assign([ast.Name(node.id)], ast.ListComp(item, loops)):
                    yield from (self.type_of(loop.iter) for loop in loops if ast.dump(loop.target) == ast.dump(item))
                case ast.Assign([ast.Name(node.id)], ast.Call(function)) if inspect.isfunction(self.find(function)):
                    yield result_of(self.find(function))
                case ast.comprehension(ast.Name(node.id), source):
                    yield (*get_args(self.type_of(source)), None)[0]

    def words(self, node: ast.expr) -> list[str]:
        """Return the words of an argument of `pick`: one, or with a star those of a variable."""
        if isinstance(node, ast.Starred):
            assigned = [
                each.value
                for each in ast.walk(self.tree)
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == ast.unparse(node.value)
            ]
            return list(ast.literal_eval(assigned[0]) if assigned else self.find(node.value))
        return [ast.literal_eval(node)]


def first_words(node: ast.expr) -> list[str]:
    """Return the first words of the pairs in a literal `(("a", x), ("b", y))`, none of anything else."""
    pairs = node.elts if isinstance(node, ast.Tuple) else []
    return [pair.elts[0].value for pair in pairs if isinstance(pair, ast.Tuple)]  # type: ignore[attr-defined]


def returned_by(function: Callable[..., Any] | None) -> Shape:
    """Return what a function of ckptkit returns, as far as its source tells."""
    if function is None or not function.__module__.startswith("ckptkit."):
        return None
    scope = Scope.of(function)
    returns = [node.value for node in ast.walk(scope.tree) if isinstance(node, ast.Return) and node.value]
    return reduce(join, map(scope.shape, returns), None)


def members_of(kind: Any) -> dict[str, Any]:
    """Return the types of the fields and properties of a class of ckptkit."""
    holder = without_none(kind)
    if not inspect.isclass(holder) or not holder.__module__.startswith("ckptkit."):
        return {}
    names = vars(sys.modules[holder.__module__])
    found = {
        key: evaluate(text, names) for base in holder.__mro__ for key, text in inspect.get_annotations(base).items()
    }
    return found | {key: result_of(each.fget) for key, each in vars(holder).items() if isinstance(each, property)}


def result_of(function: Any) -> Any:
    """Return the type of the result of a function."""
    return evaluate(inspect.signature(function).return_annotation, inspect.unwrap(function).__globals__)


def evaluate(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return the type that an annotation means, None if only type checkers can import it."""
    with suppress(NameError):
        return eval(str(annotation), {**PUBLIC, **names})
    return None


def without_none(kind: Any) -> Any:
    """Return the first type of a union."""
    return get_args(kind)[0] if isinstance(kind, UnionType) else kind


def shape_of_type(kind: Any) -> Shape:
    """Return what a value of this type becomes in JSON."""
    kind = without_none(kind)
    if is_dataclass(kind):
        types = members_of(kind)
        return {field.name: shape_of_type(types.get(field.name)) for field in fields(kind)}
    is_list = get_origin(kind) in (list, tuple, abc.Sequence)
    return [shape] if is_list and (shape := shape_of_type(get_args(kind)[0])) else None


def join(one: Shape, other: Shape) -> Shape:
    """Return the keys of both."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: join(one.get(key), other.get(key)) for key in {**one, **other}}
    return one if one is not None else other


def spell_shape(shape: Shape) -> str:
    """Return a shape as text: `{path, files: [{name, nbytes}]}`."""
    if isinstance(shape, list):
        return f"[{spell_shape(shape[0])}]" if shape[0] else "[...]"
    if isinstance(shape, dict):
        return f"{{{', '.join(key + (f': {spell_shape(value)}' if value else '') for key, value in shape.items())}}}"
    return ""
