"""Change the number of rows of a model's vocabulary: embeddings, heads and biases are cropped, or padded with zeros.

The shapes that config.json describes decide which tensors follow the vocabulary. For tensors that it does not describe,
well-known names decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import Chunk, Spec, StoredTensor, axes
from ckptkit.layout.box import Shape, full_box
from ckptkit.models.expected import AskBase, forms_of_model

# names, in all families, of tensors with a row per token
_ROWS = re.compile(
    r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings|lm_head|embed_out|shared_head\.head)\.(weight|bias)"
    r"|(model\.)?shared\.weight|backbone\.embeddings\.weight|cls\.predictions\.(bias|decoder\.(weight|bias))"
    r"|lm_head\.decoder\.(weight|bias)|vocab_projector\.(weight|bias)"
    r"|(tok_embeddings|embeddings|output|output_layer|lm_head\.w_out)\.weight|wte"
)
_KEY = "vocab_size"


def has_row_per_token(name: str) -> bool:
    """Return whether a tensor with this name has a row for each token of the vocabulary."""
    return _ROWS.fullmatch(name) is not None


def vocabulary_rows_by_name(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    return {name: tensor.spec.shape[0] for name, tensor in tensors.items() if has_row_per_token(name)}


@dataclass(frozen=True, slots=True)
class TokenAxis:
    """The axis of a tensor that has one element per token, plus `extra` elements."""

    axis: int = 0
    extra: int = 0


@dataclass(frozen=True, slots=True)
class NewVocabulary:
    """A vocabulary of `rows` rows, and the token axis of each tensor that config.json describes (None: it has none).

    `described` is empty if the model is unknown.
    """

    rows: int
    described: Mapping[str, TokenAxis | None]

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, rows: int, ask_base: AskBase = None) -> NewVocabulary:
        """Return the vocabulary for the model of a config.json.

        Raises `Mismatch` if the model cannot have that many rows, `Unsupported` for a tensor with several rows per
        token.
        """
        if config is None:
            return cls(rows, {})
        try:
            forms_of_model(config, ask_base)
        except Unsupported:
            return cls(rows, {})
        try:
            shapes, longer = (  # of all forms on disk
                {name: shape for form in reversed(forms) for name, shape in form.shapes.items()}
                for forms in (forms_of_model(with_vocabulary_size(config, n), ask_base) for n in (rows, rows + 1))
            )
        except Unsupported as error:
            raise Mismatch(f"config.json cannot describe a model with {rows} rows: {error.message}") from error
        return cls(rows, {name: token_axis_between(name, rows, shape, longer[name]) for name, shape in shapes.items()})

    def find_token_axis(self, name: str) -> TokenAxis | None:
        """Return the token axis of a tensor with this name; None if it has none."""
        return self.described[name] if name in self.described else TokenAxis() if has_row_per_token(name) else None

    def find_row_counts(self, name: str, shape: Shape, other: Shape) -> tuple[int, int] | None:
        """Return the rows of two shapes of a tensor; None if the shapes differ in more than the vocabulary."""
        token_axis = self.find_token_axis(name)
        if token_axis is None or len(shape) != len(other):
            return None
        axis, extra = token_axis.axis, token_axis.extra
        if axes.replace_sizes_at(shape, axis, 1, ()) != axes.replace_sizes_at(other, axis, 1, ()):
            return None
        return shape[axis] - extra, other[axis] - extra

    def resize_all(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return located tensors with `rows` rows in each tensor that follows the vocabulary. New rows are zero."""
        resized = dict(tensors)
        for name, tensor in tensors.items():
            token_axis = self.find_token_axis(name)
            if token_axis is None:
                continue
            axis, size, shape = token_axis.axis, self.rows + token_axis.extra, tensor.spec.shape
            if size < shape[axis]:
                resized[name] = axes.narrow_axis(tensor, axis, 0, size)
            elif size > shape[axis]:
                spec = Spec(tensor.spec.dtype, axes.replace_sizes_at(shape, axis, 1, (size - shape[axis],)))
                zeros = StoredTensor(spec, (Chunk.of_zeros(full_box(spec.shape), spec.dtype),))
                resized[name] = axes.concatenate([tensor, zeros], axis)
        return resized

    def require_one_size(self, tensors: Mapping[str, StoredTensor]) -> int:
        """Return the current number of rows. Raises `Mismatch` if no tensor has rows for tokens, or if they differ."""
        axes = {name: axis for name in tensors if (axis := self.find_token_axis(name)) is not None}
        sizes = {name: tensors[name].spec.shape[axis.axis] - axis.extra for name, axis in axes.items()}
        if not sizes:
            raise Mismatch("there is no embedding that --vocab-size could change")
        first = next(iter(sizes))
        other = next((name for name, rows in sizes.items() if rows != sizes[first]), None)
        if other is not None:
            message = f"expected {sizes[first]} rows as in `{first}`, found {sizes[other]}"
            raise Mismatch(message, tensor=other)
        return sizes[first]


def vocabulary_axes_of_config(config: Mapping[str, Any]) -> NewVocabulary:
    size = find_vocabulary_size(config)
    try:
        return NewVocabulary(0, {}) if size is None else NewVocabulary.of(config, size)
    except Unsupported:
        return NewVocabulary(size or 0, {})


def token_axis_between(name: str, rows: int, shape: Shape, longer: Shape) -> TokenAxis | None:
    """Return the axis that is longer in a model with one more token than `rows`; None if there is none."""
    grown = [axis for axis, (size, more) in enumerate(zip(shape, longer, strict=True)) if size != more]
    if not grown:
        return None
    if len(grown) > 1 or longer[grown[0]] != shape[grown[0]] + 1:
        message = f"--vocab-size adds one row per token, but one more token changes {list(shape)} to {list(longer)}"
        raise Unsupported(message, tensor=name)
    return TokenAxis(grown[0], shape[grown[0]] - rows)


def check_vocabulary_rows(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> None:
    """Raise `Mismatch` for an embedding or head whose number of rows differs from vocab_size in config.json."""
    size = find_vocabulary_size(config)
    for name, rows in vocabulary_rows_by_name(tensors).items():
        if size not in (None, rows):
            hint = f"--vocab-size {size} {'leaves out' if rows > size else 'adds zeros for'} the difference"
            message = f"expected {size} rows (vocab_size in config.json), found {rows}: one of the two is padded"
            raise Mismatch(message, tensor=name, hint=hint)


def find_vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size in a config.json (of its text model if it is multimodal); None if it is absent."""
    inner = config.get("text_config")
    size = (inner if isinstance(inner, Mapping) else config).get(_KEY, config.get(_KEY))
    return size if type(size) is int and size > 0 else None  # -1 stands for an unknown size


def with_vocabulary_size(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a config.json with another vocabulary size, at every place where it has one."""
    fixed = dict(config)
    inner = fixed.get("text_config")
    if isinstance(inner, Mapping):
        fixed["text_config"] = {**inner, _KEY: rows}
    if _KEY in fixed or not isinstance(inner, Mapping):
        fixed[_KEY] = rows
    return fixed
