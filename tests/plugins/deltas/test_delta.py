"""Deltas: what a delta makes of its base is what `consolidate` makes of the checkpoint that it was made to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import ckptkit
from ckptkit.errors import Corrupt, Mismatch, Occupied, Unsafe, Unsupported
from ckptkit.plugins.deltas.record import read_delta_record
from tests.conversion.judges import raw
from tests.plugins.deltas.models import as_dcp, as_hf, as_pt, files, load, policy, step, updated
from tests.tiers import pairs

if TYPE_CHECKING:  # it needs s3fs, which is not installed everywhere
    from tests.s3 import Place

Save = Callable[[Path, Mapping[str, Tensor]], Path]
FORMATS = (as_hf, as_dcp, as_pt)
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint64),
)


@pytest.mark.parametrize(("save_base", "save_new"), pairs(FORMATS, FORMATS))
def test_apply_makes_what_consolidate_makes(save_base: Save, save_new: Save, tmp_path: Path) -> None:
    before, after = policy(), step(policy())
    base, new = save_base(tmp_path / "base", before), save_new(tmp_path / "new", after)
    made = ckptkit.delta(base, new, tmp_path / "delta")
    assert made.record.changed == 7 + 5 + 24 + 1
    assert (len(made.record.tensors), made.record.unchanged) == (4, 3)
    ckptkit.apply(base, tmp_path / "delta", tmp_path / "out")
    ckptkit.consolidate(new, tmp_path / "expected")
    assert files(tmp_path / "out") == files(tmp_path / "expected")
    assert {name: raw(tensor) for name, tensor in load(tmp_path / "out").items()} == {
        name: raw(tensor) for name, tensor in after.items()
    }
    assert ckptkit.verify(tmp_path / "out")[0].is_ok


def test_another_tokenizer_is_said(tmp_path: Path) -> None:
    old = policy()
    base, new = as_hf(tmp_path / "base", old), as_hf(tmp_path / "new", step(old))
    for place, text in ((base, "{}"), (new, '{"version": "1.0"}')):
        (place / "tokenizer.json").write_text(text)
        (place / "config.json").write_text('{"model_type": "own"}')
    notes = ckptkit.delta(base, new, tmp_path / "delta").notes
    assert any(note.startswith("tokenizer.json: differs from ") for note in notes)


@pytest.mark.parametrize("out", ["out/delta", "out"])
def test_apply_never_replaces_the_delta_that_it_reads(tmp_path: Path, out: str) -> None:
    old = policy()
    base, new = as_hf(tmp_path / "base", old), as_hf(tmp_path / "new", step(old))
    ckptkit.consolidate(base, tmp_path / "out")
    ckptkit.delta(base, new, tmp_path / "out/delta")
    before = files(tmp_path / "out")
    with pytest.raises(Unsafe, match="the source is the destination, or inside it"):
        ckptkit.apply(base, tmp_path / "out/delta", tmp_path / out, overwrite=True)
    assert files(tmp_path / "out") == before


def test_a_delta_is_the_same_from_any_format_and_applies_to_any(tmp_path: Path) -> None:
    before, after = policy(), step(policy())
    bases = [save(tmp_path / f"base-{save.__name__}", before) for save in FORMATS]
    news = [save(tmp_path / f"new-{save.__name__}", after) for save in FORMATS]
    for i, (base, new) in enumerate(zip(bases, news, strict=True)):
        ckptkit.delta(base, new, tmp_path / f"delta-{i}")
        ckptkit.apply(bases[i - 1], tmp_path / f"delta-{i}", tmp_path / f"out-{i}")
        assert files(tmp_path / f"out-{i}") == files(tmp_path / "out-0")
    made = [
        files(tmp_path / f"delta-{i}") | {"delta.json": (tmp_path / f"delta-{i}" / "delta.json").read_bytes()}
        for i in range(3)
    ]
    assert made[0] == made[1] == made[2]


def test_fp32_masters_against_a_bf16_base(tmp_path: Path) -> None:
    """What the cast rounds away is no change."""
    before = policy(torch.float32)
    after = {name: tensor * (1 + 1e-5) for name, tensor in before.items()}
    after["embed.weight"].view(-1)[11] = 4.0
    base = as_hf(tmp_path / "base", {name: tensor.bfloat16() for name, tensor in before.items()})
    new = as_dcp(tmp_path / "new", after)
    made = ckptkit.delta(base, new, tmp_path / "delta")
    expected = sum(int((before[n].bfloat16() != after[n].bfloat16()).sum()) for n in before)
    assert 0 < made.record.changed == expected < 20
    ckptkit.apply(base, tmp_path / "delta", tmp_path / "out")
    ckptkit.consolidate(new, tmp_path / "expected", dtype="bf16")
    assert files(tmp_path / "out") == files(tmp_path / "expected")
    with pytest.raises(Mismatch, match=r"expected bfloat16\[40,16\] as in the delta, found float32"):
        ckptkit.apply(as_dcp(tmp_path / "masters", before), tmp_path / "delta", tmp_path / "other")
    ckptkit.apply(tmp_path / "masters", tmp_path / "delta", tmp_path / "other", dtype="bf16")
    assert files(tmp_path / "other") == files(tmp_path / "expected")


def test_anybody_can_read_it(tmp_path: Path) -> None:
    """Applied by safetensors and numpy alone."""
    before, after = policy(torch.float32), step(policy(torch.float32))
    ckptkit.delta(as_hf(tmp_path / "base", before), as_pt(tmp_path / "new", after), tmp_path / "delta")
    found = json.loads((tmp_path / "delta" / "delta.json").read_text())
    assert (found["format"], found["version"], found["unchanged"]) == ("ckptkit-delta", 1, 3)
    state = {name: tensor.numpy().copy() for name, tensor in before.items()}
    for name, tensor in found["tensors"].items():
        with safe_open(tmp_path / "delta" / tensor["file"], "np") as file:
            held = {key.removeprefix(name) for key in file.keys() if key.startswith(f"{name}.")}  # noqa: SIM118
            if held == {".whole"}:
                state[name] = file.get_tensor(f"{name}.whole")
                continue
            assert held == {".indices", ".values"}
            indices = file.get_tensor(f"{name}.indices")
            assert indices.dtype == np.int32
            assert len(indices) == tensor["changed"]
            assert (np.diff(indices) > 0).all()
            state[name].reshape(-1)[indices] = file.get_tensor(f"{name}.values")
    assert {name: array.tobytes() for name, array in state.items()} == {n: raw(t) for n, t in after.items()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_dtype_shape_and_change(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("any")
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for i in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = data.draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
        numel = int(np.prod(shape))
        width = torch.empty((), dtype=dtype).element_size()
        top = 2 if dtype == torch.bool else 256
        old = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, top, numel * width, np.uint8)
        changed = old.copy()
        for at in data.draw(st.lists(st.integers(0, max(numel * width - 1, 0)), max_size=6)) if numel else ():
            changed[at] = (int(changed[at]) + 1) % top
        for state, numbers in ((before, old), (after, changed)):
            state[f"t{i}.weight"] = (
                torch.from_numpy(numbers).view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)
            )
    save_base, save_new = (data.draw(st.sampled_from((as_hf, as_pt))) for _ in range(2))
    base, new = save_base(root / "base", before), save_new(root / "new", after)
    ckptkit.delta(base, new, root / "delta", force=True)
    assert ckptkit.verify_delta(root / "delta", base=base).is_ok
    ckptkit.apply(base, root / "delta", root / "out")
    found = load(root / "out")
    assert {name: raw(found[name]) for name in after} == {name: raw(tensor) for name, tensor in after.items()}
    assert {name: (found[name].dtype, found[name].shape) for name in after} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in after.items()
    }


def test_a_chain_is_applied_at_once(tmp_path: Path) -> None:
    states = [policy()]
    for seed in range(1, 4):
        states.append(step(states[-1], seed))
    states[3]["layers.1.up.bias"] = updated(states[2], {"layers.1.up.bias": 2}, 9)["layers.1.up.bias"]
    saved = [as_hf(tmp_path / f"policy-{i}", state) for i, state in enumerate(states)]
    deltas = [tmp_path / f"delta-{i}" for i in range(3)]
    for i, delta in enumerate(deltas):
        ckptkit.delta(saved[i], saved[i + 1], delta)
    ckptkit.apply(saved[0], deltas, tmp_path / "out")
    assert {n: raw(t) for n, t in load(tmp_path / "out").items()} == {n: raw(t) for n, t in states[3].items()}
    with pytest.raises(Mismatch, match=r"expected a delta of base .*, found one of"):
        ckptkit.apply(saved[0], [deltas[0], deltas[2]], tmp_path / "gap")
    with pytest.raises(Mismatch, match="expected a delta of base"):
        ckptkit.apply(saved[0], deltas[::-1], tmp_path / "gap")
    assert not (tmp_path / "gap").exists()


def test_the_shards_of_the_base_stay(tmp_path: Path) -> None:
    before, after = policy(), step(policy())
    ckptkit.consolidate(as_pt(tmp_path / "one", before), tmp_path / "base", max_shard_size=800)
    ckptkit.consolidate(as_pt(tmp_path / "two", after), tmp_path / "new", max_shard_size=800)
    assert len(files(tmp_path / "base")) > 2
    ckptkit.delta(tmp_path / "base", tmp_path / "two", tmp_path / "delta")
    ckptkit.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "new")
    assert files(tmp_path / "out", ".json").keys() == files(tmp_path / "new", ".json").keys()
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (tmp_path / "new" / index).read_bytes()


def test_shards_under_names_of_their_own(tmp_path: Path) -> None:
    before, after = policy(), step(policy())
    base = tmp_path / "base"
    base.mkdir()
    names = sorted(before)
    places = {name: f"part-{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: before[name] for name in names if places[name] == file}, base / file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    ckptkit.delta(base, as_hf(tmp_path / "new", after), tmp_path / "delta")
    ckptkit.apply(base, tmp_path / "delta", tmp_path / "out")
    assert files(tmp_path / "out").keys() == {"part-a.safetensors", "part-b.safetensors"}
    assert {n: raw(t) for n, t in load(tmp_path / "out").items()} == {n: raw(t) for n, t in after.items()}


def test_a_tensor_of_many_blocks(tmp_path: Path) -> None:
    """Changes at the borders of blocks, and in a tensor that shards of ranks cut."""
    before = {"w": torch.zeros(3, 1 << 20, dtype=torch.float32), "b": torch.zeros(3 << 20, dtype=torch.uint8)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    for at in (0, (1 << 20) - 1, 1 << 20, (3 << 20) - 1):
        after["w"].view(-1)[at] = -0.0
        after["b"][at] = 255
    base, new = as_dcp(tmp_path / "base", before), as_pt(tmp_path / "new", after)
    made = ckptkit.delta(base, new, tmp_path / "delta", jobs=3)
    assert made.record.changed == 8
    assert made.nbytes == 4 * (4 + 4) + 4 * (4 + 1)
    ckptkit.apply(base, tmp_path / "delta", tmp_path / "out", jobs=3)
    assert {n: raw(t) for n, t in load(tmp_path / "out").items()} == {n: raw(t) for n, t in after.items()}


def test_much_changed(tmp_path: Path) -> None:
    before = policy(torch.float32)
    base = as_hf(tmp_path / "base", before)
    new = as_hf(tmp_path / "new", {name: tensor + 1 for name, tensor in before.items()})
    with pytest.raises(Unsupported, match=r"at most 60% of the model, found 100% .5.8. KB.: 100% of the elements"):
        ckptkit.delta(base, new, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
    with pytest.raises(Unsupported, match="at most 60% of the model"):
        ckptkit.delta(base, new, tmp_path / "delta", dry_run=True)
    made = ckptkit.delta(base, new, tmp_path / "delta", dry_run=True, force=True)
    assert (made.share, made.density) == (1, 1)
    assert not (tmp_path / "delta").exists()
    ckptkit.delta(base, new, tmp_path / "delta", force=True)
    ckptkit.apply(base, tmp_path / "delta", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "new")
    with pytest.raises(Occupied):
        ckptkit.delta(base, new, tmp_path / "delta", force=True)


def test_nothing_changed(tmp_path: Path) -> None:
    base, new = as_hf(tmp_path / "base", policy()), as_pt(tmp_path / "new", policy())
    made = ckptkit.delta(base, new, tmp_path / "delta")
    assert made.notes == ("no tensor changed",)
    assert made.record.base == made.record.new
    ckptkit.apply(base, tmp_path / "delta", tmp_path / "out")
    assert files(tmp_path / "out") == files(base)


def test_an_identity_is_of_content_alone(tmp_path: Path) -> None:
    """The SHA-256 of a line for each tensor, as docs/deltas.md gives it."""
    import hashlib
    import zlib

    state = policy()
    ckptkit.delta(as_hf(tmp_path / "a", state), as_pt(tmp_path / "b", step(state)), tmp_path / "delta")
    lines = sorted(
        f"{name} bfloat16 [{','.join(map(str, tensor.shape))}] {zlib.crc32(raw(tensor)):08x}\n"
        for name, tensor in state.items()
    )
    assert read_delta_record(tmp_path / "delta").base == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_quantized_pairs_go_by_their_bytes(tmp_path: Path) -> None:
    before = {
        "up.weight": torch.randn(32, 32).to(torch.float8_e4m3fn),
        "up.weight_scale_inv": torch.rand(1, 1),
        "norm.weight": torch.ones(32, dtype=torch.bfloat16),
    }
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["up.weight"].view(torch.uint8)[3, 4] ^= 1
    after["up.weight_scale_inv"] *= 2
    base, new = as_hf(tmp_path / "base", before), as_hf(tmp_path / "new", after)
    made = ckptkit.delta(base, new, tmp_path / "delta")
    assert made.record.tensors.keys() == {"up.weight", "up.weight_scale_inv"}
    ckptkit.apply(base, tmp_path / "delta", tmp_path / "out")
    assert files(tmp_path / "out") == files(new)


def test_positions_beyond_31_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As though tensors of 100 elements and more were so large."""
    monkeypatch.setattr("ckptkit.plugins.deltas.open_delta._SMALL", 100)
    before, after = policy(torch.float64), step(policy(torch.float64))
    base, new = as_hf(tmp_path / "base", before), as_hf(tmp_path / "new", after)
    ckptkit.delta(base, new, tmp_path / "delta")
    with safe_open(tmp_path / "delta" / "delta-00001-of-00001.safetensors", "np") as file:
        assert file.get_tensor("embed.weight.indices").dtype == np.int64
    assert ckptkit.verify_delta(tmp_path / "delta", base=base).is_ok
    ckptkit.apply(base, tmp_path / "delta", tmp_path / "out")
    assert files(tmp_path / "out") == files(new)


@pytest.mark.slow
def test_to_a_store(place: Place, tmp_path: Path) -> None:
    """Deltas, their bases and what `apply` makes may be in S3; `cp` takes a delta from there and back."""
    before, after = policy(), step(policy())
    base, new = as_hf(tmp_path / "base", before), as_hf(tmp_path / "new", after)
    ckptkit.delta(base, new, tmp_path / "delta")
    url = f"s3://{place.name}"
    place.files.put(f"{base}/", f"{place.name}/base", recursive=True)
    made = ckptkit.delta(base, new, f"{url}/delta")
    assert (str(made.output), ckptkit.verify_delta(f"{url}/delta").is_ok) == (f"{url}/delta", True)
    with pytest.raises(Occupied, match="the destination exists"):
        ckptkit.delta(base, new, f"{url}/delta")
    copied = ckptkit.cp(f"{url}/delta", tmp_path / "copy")
    assert (copied.format, copied.unchecked_bytes > 0) == ("ckptkit-delta", True)
    assert files(tmp_path / "copy") == files(tmp_path / "delta")
    ckptkit.apply(f"{url}/base", f"{url}/delta", f"{url}/out")
    place.files.invalidate_cache()
    assert place.files.cat_file(f"{place.name}/out/model.safetensors") == (new / "model.safetensors").read_bytes()
    ckptkit.delta(f"{url}/base", f"{url}/out", tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "delta")
    with pytest.raises(Unsupported, match="cannot be written to hf:// directly"):
        ckptkit.delta(base, new, "hf://org/delta")


def test_a_damaged_delta_is_not_copied(tmp_path: Path) -> None:
    base, new = as_hf(tmp_path / "base", policy()), as_hf(tmp_path / "new", step(policy()))
    ckptkit.delta(base, new, tmp_path / "delta")
    (data,) = (tmp_path / "delta").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(Corrupt, match="as in the manifest") as refused:
        ckptkit.cp(tmp_path / "delta", tmp_path / "copy")
    assert (refused.value.path, (tmp_path / "copy").exists()) == (data, False)


def test_sixteen_ranks_under_other_names_against_the_hubs_copy(tmp_path: Path) -> None:
    """Tied weights once, names of the Hub by the config.json of the base, which the other does not have."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[3] += 1
    model.save_pretrained(tmp_path / "new")
    ckptkit.convert(tmp_path / "new", tmp_path / "sixteen", to="dcp", world_size=16, names="torchtitan")
    for path in tmp_path.joinpath("sixteen").rglob("config.json"):
        path.unlink()
    assert "tok_embeddings.weight" in str(ckptkit.open_layout(tmp_path / "sixteen").names)
    made = ckptkit.delta(tmp_path / "base", tmp_path / "sixteen", tmp_path / "delta")
    assert made.record.changed == len(list(model.parameters()))
    ckptkit.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert {n: raw(t) for n, t in again.state_dict().items()} == {n: raw(t) for n, t in model.state_dict().items()}
    back = ckptkit.delta(tmp_path / "sixteen", tmp_path / "base", tmp_path / "back")
    assert (back.record.base, back.record.new) == (made.record.new, made.record.base)
