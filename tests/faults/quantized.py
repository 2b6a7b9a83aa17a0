"""Quantized weights with hostile configs and damaged scales, made plain; and damaged weights that are quantized."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.faults.damage import Damage, cut, write
from tests.faults.few_bits import FEW_BITS, W, config_of
from tests.faults.originals import LLAMA_CONFIG, QUANTIZED_CONFIG
from tests.faults.subjects import Subject, command, read_safetensors
from tests.faults.trials import Bad, case, case_of
from tests.state.quantized.few_bits import X

WEIGHTS, SAID = "model.safetensors", "config.json"
NUMBERS, SCALES = "up.weight", "up.weight_scale_inv"
Q = "model.layers.0.self_attn.q_proj.weight"
NAME = "layers.3.ffn.experts.7.w1"  # of an expert of DeepSeek V4

PLAIN = Subject(
    *("ckptkit consolidate --dtype", frozenset({"quantized"}), "ckptkit"),
    command("consolidate", "SRC", "OUT", "--dtype", "fp32", "--names", "keep", "--no-sync"),
    read_safetensors,
)
QUANTIZE = Subject(
    *("ckptkit consolidate --quantize", frozenset({"llama"}), "ckptkit"),
    command("consolidate", "SRC", "OUT", "--quantize", "fp8-block", "--no-sync"),
    read_safetensors,
)


def said(**values: Any) -> Damage:
    """Let the config say something else of how the weights are quantized."""
    words = {**QUANTIZED_CONFIG["quantization_config"], **values}
    return write(SAID, json.dumps({**QUANTIZED_CONFIG, "quantization_config": words}).encode())


def described(**values: Any) -> Damage:
    """Let the config say something else of the model."""
    return write(SAID, json.dumps(LLAMA_CONFIG | values).encode())


def changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Change the tensors."""

    def damage(root: Path) -> None:
        tensors = load_file(root / WEIGHTS)
        change(tensors)
        (root / WEIGHTS).unlink()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, root / WEIGHTS)

    return damage


def with_scales(scales: torch.Tensor) -> Damage:
    """Have other scales."""
    return changed(lambda tensors: tensors.update({SCALES: scales}))


def with_one(number: float) -> Damage:
    """Have a scale that is this number."""
    return changed(lambda tensors: tensors[SCALES][1].fill_(number))


def fill(number: float, tensors: dict[str, torch.Tensor]) -> None:
    """Have this number in a weight."""
    tensors[Q][100, 7] = number


def bad(name: str, damage: Damage, *culprits: str, subject: Subject = PLAIN) -> Bad:
    """A model of which nothing may come out."""
    (kind,) = subject.takes
    return Bad(name, kind, damage, culprits, refused=True, seconds=10.0, memory=512 << 20, subjects=(subject,))


unquantized = partial(bad, subject=QUANTIZE)


def sound(name: str, damage: Damage, subject: Subject = PLAIN) -> Bad:
    """A model of which the same has to come out."""
    (kind,) = subject.takes
    return Bad(name, kind, damage, seconds=10.0, memory=512 << 20, subjects=(subject,))


FEW = Subject(
    *("ckptkit consolidate --dtype", frozenset(FEW_BITS), "ckptkit"),
    PLAIN.arguments,
    read_safetensors,
)


def few(name: str, kind: str, damage: Damage, *culprits: str) -> Bad:
    """A model with a matrix of few bits that must be refused."""
    return Bad(name, kind, damage, culprits, refused=True, seconds=10.0, memory=512 << 20, subjects=(FEW,))


def saying(kind: str, **more: Any) -> Damage:
    """Let the config say something else of the bits."""
    return write(SAID, json.dumps(config_of(FEW_BITS[kind](), **more)).encode())


def grouped(**more: Any) -> Damage:
    """Let the config say something else of the groups of integers."""
    groups = {"group_0": {"weights": {**FEW_BITS["int4"]().said["config_groups"]["group_0"]["weights"], **more}}}
    return saying("int4", config_groups=groups)


def with_tensor(name: str, tensor: torch.Tensor) -> Damage:
    """Have another tensor of a name."""
    return changed(lambda tensors: tensors.update({name: tensor}))


def few_bits() -> Iterator[Bad]:
    """Each kind with tensors that are missing or do not fit, and with a config that cannot be."""
    for kind, make in FEW_BITS.items():
        for name in make().tensors:
            if not name.endswith(("_shape", "input_scale")):
                yield few(f"without {name}", kind, changed(partial(lambda name, found: found.pop(name), name)), X, NAME)
        yield few("half of the file", kind, cut(WEIGHTS, keep=0.5), WEIGHTS)
    for bits in (2**40, 0, -4, "4", 4.5, True, None, 3):
        yield few(f"{bits} bits", "int4", grouped(num_bits=bits), "config.json", X)
        yield few(f"{bits} bits", "mlx", saying("mlx", bits=bits), "config.json", X)
    for size in (2**40, 0, -64, "64", 64.5, True, 48, [64]):
        yield few(f"groups of {size}", "int4", grouped(group_size=size), "config.json", X)
        yield few(f"groups of {size}", "mlx", saying("mlx", group_size=size), "config.json", X)
    for number in (float("nan"), float("inf"), float("-inf")):
        yield few(f"a scale of {number}", "int4", with_tensor(f"{W}_scale", torch.full((8, 2), number)), X)
        yield few(f"a level of {number}", "nvfp4", with_tensor(f"{W}_scale_2", torch.tensor(number)), X)
        yield few(f"scales of {number}", "mlx", with_tensor(f"{X}.scales", torch.full((44, 3), number)), X)
        yield few(f"biases of {number}", "mlx", with_tensor(f"{X}.biases", torch.full((44, 3), number)), X)
    for shape in ([2**40, 2**40], [-8, 64], [8, 63], [8], [64, 8]):
        yield few(f"shape {shape}", "int4", with_tensor(f"{W}_shape", torch.tensor(shape)), X)
    for kind, name in (
        ("int4", f"{W}_scale"),
        ("nvfp4", f"{W}_scale"),
        ("mlx", f"{X}.scales"),
        ("mxfp4", f"{NAME}.scale"),
    ):
        yield few("scales of another shape", kind, with_tensor(name, torch.ones(3, 5)), X, NAME)
        yield few("scales of integers", kind, with_tensor(name, torch.ones(8, 2, dtype=torch.int64)), X, NAME)
    yield few("another algorithm", "nvfp4", saying("nvfp4", quant_algo="NVFP5"), "NVFP5", X)
    yield few("another mode", "mlx", saying("mlx", mode="unheard of"), "unheard of")
    yield few("activations in another order", "int4", grouped(actorder="group"), "order", X)


SIZES: tuple[Any, ...] = ([0, 128], [128, -1], [2**40, 2**40], "128", [128], [1.5, 2], [True, "x"], {}, [[]], 2**70)

METHODS: tuple[Any, ...] = ("quark", 7, [], {}, "")

CASES = (
    case(
        *("65", "hostile", "quantized weights with configs that say what cannot be"),
        [
            *(bad(f"blocks of {size}", said(weight_block_size=size), "config.json", SCALES) for size in SIZES),
            bad(
                "groups of 2**40",
                said(config_groups={"g": {"weights": {"block_structure": [2**40, 1]}}}),
                "config.json",
            ),
            bad(
                "a group of words",
                said(config_groups={"g": {"weights": {"strategy": "group", "group_size": "x"}}}),
                "x",
            ),
            *(bad(f"method {method}", said(quant_method=method), "config.json") for method in METHODS),
            sound("the first group is none", said(config_groups={"g": [], "h": None, "i": {"weights": 3}})),
            sound("groups are a list", said(config_groups=[{"weights": {"block_structure": [0, 0]}}])),
            sound("no words", said(weight_block_size=None)),
        ],
    ),
    case(
        *("66", "hostile", "quantized weights with scales that are none"),
        [
            *(bad(f"a scale of {number}", with_one(number), SCALES) for number in (0.0, -1.0, 3e38)),
            *(bad(f"a scale of {number}", with_one(float(number)), SCALES) for number in ("nan", "inf", "-inf")),
            *(
                bad(f"{shape} scales", with_scales(torch.ones(shape)), SCALES)
                for shape in ((3, 2), (4,), (2, 2, 1), (0, 2))
            ),
            bad("integers", with_scales(torch.ones(2, 2, dtype=torch.int64)), SCALES),
            bad("no scales", changed(lambda tensors: tensors.pop(SCALES)), NUMBERS),
            bad("no numbers", changed(lambda tensors: tensors.pop(NUMBERS)), SCALES),
            bad("plain numbers", changed(lambda tensors: tensors.update({NUMBERS: torch.ones(200, 130)})), SCALES),
            bad("half of the file", cut(WEIGHTS, keep=0.5), WEIGHTS),
            bad(
                "blocks larger than the weight",
                changed(lambda tensors: tensors.update({NUMBERS: tensors[NUMBERS][:9]})),
                SCALES,
            ),
        ],
    ),
    case(
        *("67", "hostile", "weights that no scale can be found for"),
        [
            *(
                unquantized(f"a weight with {number}", changed(partial(fill, float(number))), Q)
                for number in ("nan", "inf", "-inf")
            ),
            unquantized("half of the file", cut(WEIGHTS, keep=0.5), WEIGHTS),
            unquantized("a weight gone", changed(lambda tensors: tensors.pop(Q)), Q),
            unquantized("another shape", changed(lambda tensors: tensors.update({Q: torch.ones(128, 64)})), Q),
            unquantized(
                "integers", changed(lambda tensors: tensors.update({Q: torch.ones(128, 128, dtype=torch.int8)})), Q
            ),
            unquantized("no config", write(SAID, b"{}"), "config.json"),
            unquantized("an unknown type", described(model_type="unheard_of"), "linear"),
            *(unquantized(f"hidden size {size}", described(hidden_size=size)) for size in (2**40, 0, -128, "x", 96)),
            *(unquantized(f"{count} layers", described(num_hidden_layers=count)) for count in (2**40, 2)),
            sound("leftover words", described(quantization_config={"weight_block_size": "x"}), QUANTIZE),
        ],
    ),
    case_of("68", "hostile", "weights of few bits with what does not fit them", few_bits),
)
