"""Bad input of deltas: each is an error that says what is wrong, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptkit
from ckptkit.errors import CkptError, Corrupt, Incomplete, Mismatch, NotACheckpoint, Unsupported
from ckptkit.plugins.deltas.apply_in_place import apply_in_place
from tests.plugins.deltas.models import as_hf, files, policy, step, updated

PAYLOAD = "delta-00001-of-00001.safetensors"


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a delta of it, without a manifest that would tell every change by its checksums."""
    base = as_hf(tmp_path / "base", policy(torch.float32))
    new = as_hf(tmp_path / "new", step(policy(torch.float32)))
    ckptkit.delta(base, new, tmp_path / "delta")
    (tmp_path / "delta" / "ckptkit.json").unlink()
    return base, tmp_path / "delta"


def refused(base: Path, delta: Path, kind: type[CkptError], words: str) -> None:
    """Both `apply`, which writes nothing, and `verify` say it."""
    out = base.parent / "out"
    with pytest.raises(kind, match=words):
        ckptkit.apply(base, delta, out)
    assert not out.exists()
    assert not list(base.parent.glob(".*"))
    found = ckptkit.verify_delta(delta, base=base)
    assert not found.is_ok


def rewrite(delta: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    held = load_file(delta / PAYLOAD)
    change(held)
    save_file(held, delta / PAYLOAD)


def test_no_delta_json(made: tuple[Path, Path]) -> None:
    (made[1] / "delta.json").unlink()
    refused(*made, Incomplete, "`delta.json` is missing: this is not a delta, or an unfinished one")
    with pytest.raises(Incomplete, match=r"`delta\.json` is missing"):
        ckptkit.inspect_delta(made[1])
    with pytest.raises(Unsupported, match="expected a checkpoint, found a delta"):
        ckptkit.inspect(made[1])


def test_nothing_is_there(made: tuple[Path, Path], tmp_path: Path) -> None:
    base, delta = made
    for one, other in ((base, tmp_path / "nowhere"), (tmp_path / "nowhere", delta)):
        with pytest.raises(NotACheckpoint, match="nowhere: no such file or directory"):
            ckptkit.apply(one, other, tmp_path / "out")
        with pytest.raises(NotACheckpoint, match="nowhere: no such file or directory"):
            ckptkit.verify_delta(other, base=one)


def test_a_missing_file(made: tuple[Path, Path]) -> None:
    (made[1] / PAYLOAD).unlink()
    refused(*made, Incomplete, "missing")


def test_a_truncated_payload(made: tuple[Path, Path]) -> None:
    path = made[1] / PAYLOAD
    path.write_bytes(path.read_bytes()[:-5])
    refused(*made, Corrupt, "bytes .header., found")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("delta.json", b"{", "not valid JSON"),
        ("delta.json", b"{}", "expected format `ckptkit-delta`"),
        ("delta.json", b'{"format": "ckptkit-delta", "version": 1}', "not a `delta.json` of version 1"),
        (
            "delta.json",
            b'{"format": "ckptkit-delta", "version": 1, "tensors": {}, "base": null}',
            "expected a SHA-256, found None",
        ),
    ],
)
def test_another_delta_json(made: tuple[Path, Path], name: str, value: bytes, words: str) -> None:
    (made[1] / name).write_bytes(value)
    refused(*made, Corrupt, words)


def test_a_later_version(made: tuple[Path, Path]) -> None:
    path = made[1] / "delta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    refused(*made, Unsupported, "expected version 1, found 2")


def test_a_file_outside(made: tuple[Path, Path]) -> None:
    path = made[1] / "delta.json"
    path.write_text(path.read_text().replace(PAYLOAD, "../new/model.safetensors"))
    with pytest.raises(CkptError):
        ckptkit.apply(*made, made[0].parent / "out")


def test_another_base(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, delta = made
    other = as_hf(tmp_path / "other", policy(torch.float32, seed=5))
    refused(other, delta, Mismatch, r"expected base \w{12}, found \w{12}: 4 of 4 tensors that the delta changes differ")
    near = as_hf(tmp_path / "near", updated(policy(torch.float32), {"layers.0.up.bias": 1}))
    refused(near, delta, Mismatch, "a tensor that the delta does not change differs")
    with pytest.raises(Mismatch, match="the delta is applied already"):
        ckptkit.apply(tmp_path / "new", delta, tmp_path / "out")


def test_other_names_shapes_and_dtypes(made: tuple[Path, Path], tmp_path: Path) -> None:
    base, delta = made
    state = policy(torch.float32)
    less = as_hf(tmp_path / "less", {name: tensor for name, tensor in state.items() if name != "scale"})
    refused(less, delta, Mismatch, "the delta changes this tensor, but the base lacks it")
    wide = as_hf(tmp_path / "wide", state | {"scale": torch.ones(2)})
    refused(wide, delta, Mismatch, r"expected float32\[\] as in the delta, found float32\[2\]")
    half = as_hf(tmp_path / "half", state | {"scale": torch.ones((), dtype=torch.int32)})
    refused(half, delta, Mismatch, r"expected float32\[\] as in the delta, found int32\[\]")
    for i, (one, two, words) in enumerate(
        (
            (base, less, "expected the tensors of"),
            (less, base, "expected the tensors of .*: `scale`"),
            (base, wide, r"expected float32\[\] as in .*, found float32\[2\]"),
            (base, half, r"expected float32\[\] as in .*, found int32\[\]"),
        )
    ):
        with pytest.raises(Mismatch, match=words):
            ckptkit.delta(one, two, tmp_path / f"delta-{i}")
        assert not (tmp_path / f"delta-{i}").exists()


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (-1, 640, "expected positions from 0 to 639, found 640"),
        (-1, 2**31 - 1, "expected positions from 0 to 639, found 2147483647"),
        (0, -1, "expected positions from 0 to 639, found -1"),
        (2, -3, "expected positions from 0 to 639, found -3"),
        (0, 639, "expected strictly increasing positions, found position"),
    ],
)
def test_positions(made: tuple[Path, Path], at: int, value: int, words: str) -> None:
    def change(held: dict[str, Tensor]) -> None:
        held["embed.weight.indices"][at] = value

    rewrite(made[1], change)
    refused(*made, Corrupt, words)


def test_a_position_twice(made: tuple[Path, Path]) -> None:
    def change(held: dict[str, Tensor]) -> None:
        held["embed.weight.indices"][3] = held["embed.weight.indices"][2]

    rewrite(made[1], change)
    refused(*made, Corrupt, r"expected strictly increasing positions, found position \d+ twice")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: held.pop("scale.whole"), "expected .indices and .values, or .whole, found nothing"),
        (lambda held: held.pop("embed.weight.values"), "or .whole, found .indices"),
        (lambda held: held.update({"x.whole": torch.ones(1)}), "`delta.json` does not name this tensor"),
        (
            lambda held: held.update({"scale.whole": torch.ones(1)}),
            r"expected float32\[\] in .whole, found float32\[1\]",
        ),
        (lambda held: held.update({"scale.whole": torch.ones(())}), "expected CRC-32 .* of the whole tensor, found"),
        (
            lambda held: held.update({"embed.weight.values": held["embed.weight.values"].half()}),
            r"expected float32\[7\] in .values, found float16\[7\]",
        ),
        (
            lambda held: held.update({"embed.weight.values": held["embed.weight.values"][:-1].clone()}),
            r"expected float32\[7\] in .values, found float32\[6\]",
        ),
        (
            lambda held: held.update({"embed.weight.indices": held["embed.weight.indices"].short()}),
            r"expected int32\[7\] in .indices, found int16\[7\]",
        ),
    ],
)
def test_other_contents(made: tuple[Path, Path], change: Callable[[dict[str, Tensor]], object], words: str) -> None:
    rewrite(made[1], change)
    refused(*made, Corrupt, words)


def test_another_result(made: tuple[Path, Path]) -> None:
    """A delta must lead to the model that it names: known before anything is written."""
    base, delta = made
    path = delta / "delta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new": "0" * 64}))
    refused(base, delta, Corrupt, "delta.json: expected weights 000000000000 after the delta, found")
    before = files(base)
    with pytest.raises(Corrupt, match="expected weights 000000000000 after the delta"):
        apply_in_place(base, delta)
    assert files(base) == before


def test_other_values_are_found_before_the_output_appears(made: tuple[Path, Path]) -> None:
    """Without a manifest only the CRC-32 of the result tells; the error names the file of the delta."""

    def change(held: dict[str, Tensor]) -> None:
        held["embed.weight.values"][0] += 1

    rewrite(made[1], change)
    refused(*made, Corrupt, rf"{PAYLOAD}: tensor `embed.weight`: expected CRC-32 .* in the output, found")
    before = files(made[0])
    with pytest.raises(Corrupt, match=rf"{PAYLOAD}: tensor `embed.weight`: expected CRC-32 .* after the change, found"):
        apply_in_place(*made)
    assert files(made[0]) == before
    assert {path.name for path in made[0].iterdir()} == {"model.safetensors"}


def test_a_flipped_bit_with_a_manifest(tmp_path: Path) -> None:
    base, new = as_hf(tmp_path / "base", policy()), as_hf(tmp_path / "new", step(policy()))
    ckptkit.delta(base, new, tmp_path / "delta")
    for name in (PAYLOAD, "delta.json"):
        other = tmp_path / f"other-{name}"
        shutil.copytree(tmp_path / "delta", other)
        data = bytearray((other / name).read_bytes())
        data[-1 if name == PAYLOAD else data.index(b'"tool"') + 20] ^= 1
        (other / name).write_bytes(data)
        assert "CRC-32" in str(ckptkit.verify_delta(other).problems[0])


def test_nan_is_said(tmp_path: Path) -> None:
    """VLLM refuses NaN in a patch; as a value it is legal."""
    state = policy()
    after = {name: tensor.clone() for name, tensor in state.items()}
    after["embed.weight"][2, 3] = float("nan")
    base = as_hf(tmp_path / "base", state)
    made = ckptkit.delta(base, as_hf(tmp_path / "new", after), tmp_path / "delta")
    assert made.notes == ("1 new value is NaN: vLLM refuses such a patch",)
    found = ckptkit.verify_delta(tmp_path / "delta", base=base)
    assert found.is_ok
    assert found.notes == made.notes


def test_adapters_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        state = {f"base_model.model.up.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
        save_file(state, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up"]})
        )
    with pytest.raises(Unsupported, match="ckptkit does not write deltas of adapters"):
        ckptkit.delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta")
