"""Compute low-bit weights in groups of neighbors: unpack numbers from a bit stream, then apply scales.

Rows of a weight are divided into groups. Further tensors have one element per group: a scale, a zero point, a bias.
Each `GroupStep` of a recipe applies one of them. All is computed in float32; products are rounded to another dtype
where the quantizing library does so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import NamedTuple, Protocol

import numpy as np

from ckptkit.engine.casting import cast_into, widener
from ckptkit.engine.recipes import FLOAT32, Array, round_to_bytes
from ckptkit.errors import Corrupt
from ckptkit.layout.box import Box, Shape, full_box
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Operand, RecipeVerdict, identity_region
from ckptkit.models.fit import join_few_names
from ckptkit.state.quantized.dequantize_blocks import (
    FOUR_BITS,
    check_scale_factors,
    check_zero_scales,
    four_bit_pair_table,
    scales_as_float32,
    value_table_of,
)
from ckptkit.words import count


class GroupStep(Protocol):
    """A step that changes the numbers of groups, with tensors that have one element per group.

    The region of an operand receives a box of groups: rows of the weight, and group indices instead of columns.
    """

    @property
    def operands(self) -> Sequence[Operand]:
        """Return the tensors that the step reads."""

    def __call__(self, values: Array, blocks: Sequence[memoryview], groups: Box) -> bool:
        """Change the numbers of groups in place; the last axis runs over the numbers of a group.

        Returns whether there is something to report. Raises `Corrupt` for invalid elements.
        """


class Codes(NamedTuple):
    """Numbers of `bits` bits each, packed from the lowest bit on, and the value of each bit pattern."""

    bits: int
    numbers: tuple[float, ...]

    def unpack_numbers(self, raw: Array) -> Array:
        """Return the numbers in rows of bytes, as float32."""
        if self.bits == 8:
            return value_table_of(self.numbers).take(raw)
        if self.bits == 4:
            unpacked: Array = four_bit_pair_table(self.numbers).take(raw).view(np.float32)
            return unpacked
        runs = raw.reshape(*raw.shape[:-1], -1, self.bits)  # each has eight numbers in `bits` bytes
        streams = sum(runs[..., number].astype(np.uint64) << np.uint64(8 * number) for number in range(self.bits))
        shifts = np.arange(8, dtype=np.uint64) * np.uint64(self.bits)
        patterns = (np.asarray(streams)[..., None] >> shifts) & np.uint64((1 << self.bits) - 1)
        numbers: Array = value_table_of(self.numbers).take(patterns.reshape(*raw.shape[:-1], -1).astype(np.intp))
        return numbers


class GroupedRecipe:
    """The recipe of a weight whose rows are groups of `group` numbers, stored as `codes` in the first operand.

    `parts` are applied in order. The product is rounded to `rounds_to` before it is cast to the requested dtype. The
    group size must divide the rows of `shape`.
    """

    def __init__(
        self,
        numbers: Operand,
        codes: Codes,
        parts: Sequence[GroupStep],
        shape: Shape,
        group: int,
        rounds_to: DType = FLOAT32,
    ) -> None:
        self.verdict: RecipeVerdict | None = next((part.verdict for part in parts if isinstance(part, Extremes)), None)
        self._codes, self._parts, self._shape, self._group = codes, parts, shape, group
        self._rounds_to = rounds_to
        self._bits = 8 * numbers.dtype.itemsize
        unit = lcm(self._bits, codes.bits, 8 * codes.bits) // codes.bits  # fewest numbers that fill stored elements
        self._step = unit if group == shape[-1] else lcm(unit, group)
        of_parts = (self._with_group_region(operand) for part in parts for operand in part.operands)
        self.operands = (numbers._replace(region=self._stored_box), *of_parts)

    def _with_group_region(self, operand: Operand) -> Operand:
        return operand._replace(region=lambda box: operand.region(self._box_of_groups(box)))

    def _column_range(self, box: Box) -> tuple[int, int]:
        """Return the range of columns to compute for a box: whole groups, in whole stored elements."""
        low = box.start[-1] // self._step * self._step
        high = -(-box.stop[-1] // self._step) * self._step
        return low, min(high, self._shape[-1])

    def _stored_box(self, box: Box) -> Box:
        """Return the box of stored elements that contain the columns of a box."""
        low, high = self._column_range(box)
        start, stop = low * self._codes.bits // self._bits, -(-high * self._codes.bits // self._bits)
        return Box((*box.start[:-1], start), (*box.size[:-1], stop - start))

    def _box_of_groups(self, box: Box) -> Box:
        """Return the box of groups that contain the columns of a box."""
        low, high = self._column_range(box)
        start, stop = low // self._group, -(-high // self._group)
        return Box((*box.start[:-1], start), (*box.size[:-1], stop - start))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box as `dtype`, and whether a step has something to report."""
        low, high = self._column_range(box)
        raw = np.frombuffer(blocks[0], np.uint8).reshape(*box.size[:-1], -1)
        bits = self._codes.bits
        if bits not in (4, 8) and (lacking := -raw.shape[-1] % bits):
            # `Codes.unpack_numbers` needs a multiple of eight numbers
            raw = np.pad(raw, [(0, 0)] * (raw.ndim - 1) + [(0, lacking)])
        values = np.ascontiguousarray(self._codes.unpack_numbers(raw)[..., : high - low])
        groups = self._box_of_groups(box)
        cells = values.reshape(*groups.size, -1)
        has_remark = False
        at = 1
        for part in self._parts:
            stop = at + len(part.operands)
            has_remark |= part(cells, blocks[at:stop], groups)
            at = stop
        if self._rounds_to not in (FLOAT32, dtype):
            round_in_place(self._rounds_to, values)
        first = box.start[-1] - low
        return round_to_bytes(values[..., first : first + box.size[-1]], FLOAT32, dtype), has_remark


class Factors:
    """Multiply the numbers of each group with its scale, which must not be negative.

    `largest` is the magnitude of the largest number. A scale of 0 is an error if the numbers are not 0, unless
    `may_vanish`: a small scale that is rounded to few bits may become 0.
    """

    def __init__(self, scales: Operand, shape: Shape, largest: float, *, may_vanish: bool = False) -> None:
        self.operands: Sequence[Operand] = (per_group_operand(scales, shape),)
        self._name, self._largest, self._may_vanish = scales.name, largest, may_vanish

    def __call__(self, values: Array, blocks: Sequence[memoryview], groups: Box) -> bool:
        """Multiply. Raises `Corrupt` for invalid scales."""
        factors = self._factors(blocks)
        check_scale_factors(factors, self._name, self._largest)
        spread = broadcast_over(factors, groups)
        if not self._may_vanish:
            check_zero_scales(values, spread, self._name)
        values *= spread
        return False

    def _factors(self, blocks: Sequence[memoryview]) -> Array:
        return scales_as_float32(self.operands[0], blocks[0])


class TwoLevels(Factors):
    """Multiply the numbers of each group with its scale, times (or divided by) one scale for the whole weight."""

    def __init__(self, scales: Operand, whole_scale: Operand, shapes: Sequence[Shape], *, divides: bool) -> None:
        super().__init__(scales, shapes[0], max(FOUR_BITS), may_vanish=True)
        self.operands = (*self.operands, per_group_operand(whole_scale, shapes[1]))
        self._divides = divides

    def _factors(self, blocks: Sequence[memoryview]) -> Array:
        scales, level = scales_as_float32(self.operands[0], blocks[0]), scales_as_float32(self.operands[1], blocks[1])
        if not (np.isfinite(level).all() and (level > 0).all()):
            worst = f"expected a finite scale above 0 in `{self.operands[1].name}`, found {level[0]:g}"
            raise Corrupt(worst, hint="run `ckptkit verify`: these bytes may belong to another tensor")
        with np.errstate(over="ignore"):
            combined: Array = scales / level if self._divides else scales * level
        return combined


class ZeroPoints:
    """Subtract the zero point of each group: one int8 each, or `bits` bits each in 32-bit words of consecutive rows."""

    def __init__(self, zeros: Operand, shape: Shape, bits: int | None = None) -> None:
        self._words = 0 if bits is None else 32 // bits
        self._bits = bits or 0
        region = self._box_of_words if bits else zeros.region
        self.operands = (zeros._replace(region=region) if bits else per_group_operand(zeros, shape),)

    def _box_of_words(self, groups: Box) -> Box:
        row, number = groups.start[-2], groups.size[-2]
        start, stop = row // self._words, -(-(row + number) // self._words)
        first = (*groups.start[:-2], start, groups.start[-1])
        return Box(first, (*groups.size[:-2], stop - start, groups.size[-1]))

    def __call__(self, values: Array, blocks: Sequence[memoryview], groups: Box) -> bool:
        if not self._words:
            values -= broadcast_over(np.frombuffer(blocks[0], np.int8).astype(np.float32), groups)
            return False
        word_box = self._box_of_words(groups)
        words = np.frombuffer(blocks[0], np.uint32).reshape(*word_box.size[:-1], 1, word_box.size[-1])
        shifts = np.arange(self._words, dtype=np.uint32)[:, None] * np.uint32(self._bits)
        zeros = ((words >> shifts) & np.uint32((1 << self._bits) - 1)).astype(np.float32)
        zeros = zeros.reshape(*word_box.size[:-2], -1, word_box.size[-1]) - np.float32(1 << (self._bits - 1))
        first = groups.start[-2] - word_box.start[-2] * self._words
        values -= zeros[..., first : first + groups.size[-2], :, None]
        return False


class Affine:
    """Multiply the numbers of each group with its scale, round, and add its bias, as MLX does on a CPU."""

    def __init__(self, scales: Operand, biases: Operand, stored_as: DType) -> None:
        self.operands = (scales._replace(region=identity_region), biases._replace(region=identity_region))
        self._rounds_to = stored_as

    def __call__(self, values: Array, blocks: Sequence[memoryview], groups: Box) -> bool:
        """Multiply and add. Raises `Corrupt` for scales and biases that are not finite. A scale may be negative."""
        scales, biases = (np.frombuffer(block, np.float32) for block in blocks)
        for operand, values_read in zip(self.operands, (scales, biases), strict=True):
            if not np.isfinite(values_read).all():
                worst = values_read[~np.isfinite(values_read)][0]
                hint = "run `ckptkit verify`: these bytes may belong to another tensor"
                raise Corrupt(f"expected finite values in `{operand.name}`, found {worst:g}", hint=hint)
        values *= broadcast_over(scales, groups)
        if self._rounds_to != FLOAT32:
            round_in_place(self._rounds_to, values)
        values += broadcast_over(biases, groups)
        return False


class DeclaredShape:
    """Compare the shape of a weight that a tensor declares with the shape that was found."""

    def __init__(self, declared: Operand, shape: Shape) -> None:
        self.operands = (declared._replace(region=lambda _: full_box((len(shape),))),)
        self._shape = shape

    def __call__(self, values: Array, blocks: Sequence[memoryview], groups: Box) -> bool:  # noqa: ARG002
        """Raise `Corrupt` for another shape."""
        (operand,) = self.operands
        declared = np.frombuffer(blocks[0], f"i{operand.dtype.itemsize}").tolist()
        if tuple(declared) != self._shape:
            raise Corrupt(f"`{operand.name}`: expected {list(self._shape)}, found {declared}")
        return False


@dataclass(frozen=True, slots=True)
class Requantized:
    """The verdict whether integers of `bits` bits would be the same if their weights were quantized again.

    A new quantization would use the maximum of each group, divided by the largest integer, as scale.
    """

    bits: int

    @property
    def largest_integer(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def verdict_sentence(self, checked: Sequence[str], noted: Collection[str]) -> str:
        """Return a sentence on how many weights would be the same; those in `noted` would not."""
        others = [name for name in checked if name in noted]
        again = f"quantizing to int{self.bits} again, with scales of maximum / {self.largest_integer}, restores"
        if not others:
            return f"{again} the same integers in {count(len(checked), 'weight')}"
        some = f"only {len(checked) - len(others)} of {count(len(checked), 'weight')}"
        return f"{again} the same integers in {some}, not in {join_few_names(others)}"


class Extremes:
    """Report groups whose integers would change if their weights were quantized again.

    These are groups that have no integer of the largest magnitude, or a larger one, unless all are 0.
    """

    operands: Sequence[Operand] = ()

    def __init__(self, bits: int) -> None:
        self.verdict = Requantized(bits)

    def __call__(self, values: Array, blocks: Sequence[memoryview], groups: Box) -> bool:  # noqa: ARG002
        """Return whether there is such a group."""
        # halving neighbors takes a sixth of the time of `max(-1)`
        maxima, size = np.abs(values).reshape(-1), values.shape[-1]
        while size % 2 == 0:
            maxima, size = np.maximum(maxima[::2], maxima[1::2]), size // 2
        peaks = maxima.reshape(-1, size).max(-1)
        return bool(((peaks != self.verdict.largest_integer) & (peaks != 0)).any())


def per_group_operand(operand: Operand, shape: Shape) -> Operand:
    """Return an operand with one element per group, or a single element for all groups."""
    return operand._replace(region=(lambda _: full_box(shape)) if prod(shape) == 1 else identity_region)


def broadcast_over(values: Array, groups: Box) -> Array:
    """Return values of groups with an extra axis for broadcasting over their numbers."""
    return values if values.size == 1 else values.reshape(*groups.size, 1)


def round_in_place(dtype: DType, values: Array) -> None:
    """Round float32 values to another dtype, in place."""
    flat = values.reshape(-1)
    rounded = np.empty(flat.size, f"u{dtype.itemsize}")
    cast_into(flat, FLOAT32, dtype, rounded)
    flat[:] = widener(dtype)(rounded)
