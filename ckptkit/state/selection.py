"""Select, rename and cast entries of a checkpoint by globs, rules and dtypes. Moves no bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Mismatch, Usage
from ckptkit.io.path import to_model_path
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.dtypes import DType, parse_dtype
from ckptkit.layout.renames import numbers_to_wildcards, parse_rule, renaming_function
from ckptkit.words import count

LIKE = "like:"


@dataclass(frozen=True, slots=True)
class Edits:
    """The requested edits: globs of names to include and exclude, rules `REGEX=>TEXT`, dtypes `DTYPE` or `GLOB=DTYPE`.

    Globs match names in the source, as `inspect SRC --tensors` shows them. Globs of dtypes that match none of these
    match names in the output. A pattern that matches nothing is an error unless `allow_unmatched`.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    dtype: Sequence[str] = ()
    allow_unmatched: bool = False

    def check_rule_syntax(self) -> None:
        """Raise `Usage` for an invalid rule."""
        for rule in self.rename:
            parse_rule(rule)
        for rule in self.dtype:
            parse_dtype_rule(rule)

    def is_selected(self, name: str) -> bool:
        included = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return included and not any(fnmatchcase(name, glob) for glob in self.exclude)

    def reasons_to_drop(self, names: Iterable[str]) -> dict[str, str]:
        """Return the entries that are not selected, each with the option that drops it."""
        rejected = [name for name in names if not self.is_selected(name)]
        excluded = {name for name in rejected if any(fnmatchcase(name, glob) for glob in self.exclude)}
        return {name: "--exclude" if name in excluded else "--include" for name in rejected}

    def check_globs(self, layouts: Sequence[Layout], path: Path) -> None:
        """Raise `Usage` if an `--include` or `--exclude` matches no entry of the layouts, or if no entry is left.

        `path` is the checkpoint that the error names, as in all checks.
        """
        names = [name for layout in layouts for name in layout.names]
        self.require_matches("--include", self.include, names, path)
        self.require_matches("--exclude", self.exclude, names, path)
        self.require_some_left(set(names), path)

    def require_some_left(self, names: Collection[str], path: Path) -> None:
        """Raise `Usage` if `--include` and `--exclude` leave none of the names."""
        if (self.include or self.exclude) and not any(map(self.is_selected, names)):
            hint = "change --include or --exclude; run `ckptkit inspect CKPT --tensors` to list all names"
            raise Usage(f"--include and --exclude leave none of {count(len(names), 'entry')}", path=path, hint=hint)

    def dtype_rules(self, source_names: Iterable[str]) -> list[DtypeRule]:
        """Return the rules of `--dtype` for a conversion of tensors whose names in the source are `source_names`."""
        names = list(source_names)
        rules = []
        for glob, dtype in map(parse_dtype_rule, self.dtype):
            is_of_output = glob is not None and not any(fnmatchcase(name, glob) for name in names)
            rules.append(DtypeRule(dtype, glob, is_of_output))
        return rules

    def check_dtype_globs(self, rules: Iterable[DtypeRule], output_names: Collection[str], path: Path) -> list[str]:
        """Return a note for each glob that matches only names in the output. Raises `Usage` for one without a match."""
        globs = [rule.glob for rule in rules if rule.glob is not None and rule.is_of_output]
        self.require_matches("--dtype", globs, output_names, path)
        matched = [glob for glob in globs if any(fnmatchcase(name, glob) for name in output_names)]
        return [f"--dtype '{glob}' matches names in the output, but none in the source" for glob in matched]

    def check_renames(self, names: Iterable[str], path: Path) -> None:
        """Raise `Usage` for a `--rename` rule that matches no name of a parameter, after the rules before it."""
        names = list(names)
        for rule in self.rename:
            pattern, text = parse_rule(rule)
            self.require_matches(
                "--rename", [rule], names, path, lambda name, rule: bool(parse_rule(rule)[0].search(name))
            )
            names = [pattern.sub(text, name) for name in names]

    def require_matches(
        self,
        option: str,
        patterns: Iterable[str],
        names: Collection[str],
        path: Path,
        is_match: Callable[[str, str], bool] = fnmatchcase,
        what: str = "tensor",
    ) -> None:
        """Raise `Usage`, with the most similar names, for a pattern of an option that matches none of the names."""
        for pattern in () if self.allow_unmatched else patterns:
            if not any(is_match(name, pattern) for name in names):
                by_module = {
                    numbers_to_wildcards(name): name for name in names
                }  # the nearest names, each in another module
                similar = get_close_matches(numbers_to_wildcards(pattern.partition("=>")[0]), by_module, n=3, cutoff=0)
                near = [by_module[one] for one in similar]
                hint = f"match one of the nearest names, {', '.join(near)}; " if near else ""
                hint += "run `ckptkit inspect CKPT --tensors` to list all names; or pass --allow-unmatched"
                raise Usage(f"{option} '{pattern}' matches no {what}", path=path, hint=hint)

    @property
    def changes_names(self) -> bool:
        return bool(self.include or self.exclude or self.rename)

    @property
    def dtype_of_weights(self) -> DType | None:
        """Return the dtype requested for all weights; None if they keep their own or follow another model's."""
        dtypes = [dtype for glob, dtype in map(parse_dtype_rule, self.dtype) if glob is None]
        return dtypes[-1] if dtypes and isinstance(dtypes[-1], DType) else None

    def make_renaming(self) -> Callable[[str], str]:
        """Return the function that applies all rename rules to a parameter's name, in order."""
        return renaming_function(self.rename)


@dataclass(frozen=True, slots=True)
class DtypeRule:
    """A rule of `--dtype`: the dtype of all weights, or of the tensors that match a glob. None keeps their own dtype.

    The glob matches names in the source or, if `is_of_output`, names in the output.
    """

    dtype: DType | Like | None
    glob: str | None
    is_of_output: bool


def find_wanted_dtype(
    rules: Sequence[DtypeRule], name: str, made_of: Iterable[str], *, is_weight: bool = True
) -> DType | Like | None:
    """Return the dtype (or the model with the dtype) that the last matching rule requests; None to keep the dtype.

    The tensor of this name in the output is made of the tensors `made_of` of the source.
    """
    for rule in reversed(rules):
        names = (name,) if rule.is_of_output else made_of
        if is_weight if rule.glob is None else any(fnmatchcase(one, rule.glob) for one in names):
            return rule.dtype
    return None


def apply_dtypes(
    layout: Layout,
    rules: Sequence[DtypeRule],
    made_of: Mapping[str, Collection[str]],
    is_weight: Callable[[str], bool],
) -> tuple[Layout, dict[str, str]]:
    """Return the layout in the requested dtypes, and the change of each changed tensor.

    `made_of` gives the names in the source that each tensor is made of. Only floats of 16 bits and more are converted.
    A dtype without a glob applies to the model's weights only: optimizer state and step counts need their precision.
    Raises `Mismatch` for a weight that a model in `like:MODEL` does not have.
    """
    models = {rule.dtype: rule.dtype.specs() for rule in rules if isinstance(rule.dtype, Like)}

    def choose(name: str, spec: Spec) -> DType:
        requested = find_wanted_dtype(rules, name, made_of[name], is_weight=is_weight(name))
        if isinstance(requested, Like):
            requested = requested.dtype_for(models[requested], name, spec)
        return requested if requested and spec.dtype.is_castable_to(requested) else spec.dtype

    changed = edits.cast_tensors(layout, choose)
    casts = {
        name: f"{before} => {after}"
        for name, tensor in layout.tensors.items()
        if (before := tensor.spec.dtype) != (after := changed.tensors[name].spec.dtype)
    }
    return changed, casts


@dataclass(frozen=True, slots=True)
class Like:
    """The dtypes of another model's tensors, a local one or one on the Hub. Only its headers are read."""

    model: str

    def specs(self) -> Mapping[str, Spec]:
        return Checkpoint.open(to_model_path(self.model)).weights.layout.specs

    def dtype_for(self, specs: Mapping[str, Spec], name: str, spec: Spec) -> DType:
        """Return the dtype of the tensor of the same name. Raises `Mismatch` if it is missing or cannot be cast to."""
        if name not in specs:
            hint = f"add a rule after this one, such as --dtype '{name}=keep'"
            raise Mismatch(f"{self.model} does not have this tensor, so its dtype is unknown", tensor=name, hint=hint)
        wanted = specs[name].dtype
        if wanted != spec.dtype and not spec.dtype.is_castable_to(wanted):
            message = f"expected {wanted} as in {self.model}, found {spec.dtype}, which cannot be cast to it"
            raise Mismatch(message, tensor=name)
        return wanted


def parse_dtype_rule(rule: str) -> tuple[str | None, DType | Like | None]:
    """Return glob (None without one) and dtype (None for `keep`) of `GLOB=DTYPE`, or of `GLOB=like:MODEL`."""
    before, like, model = rule.partition(LIKE)
    if like and model and (not before or before.endswith("=")):
        return before.removesuffix("=") or None, Like(model)
    glob, equals, name = rule.rpartition("=")
    if name == "keep":
        return (glob if equals else None), None
    dtype = parse_dtype(name)
    if not dtype.is_castable_to(dtype):
        raise Usage(f"expected float64, float32, float16 or bfloat16 as the dtype of weights, found {dtype}")
    return (glob if equals else None), dtype
