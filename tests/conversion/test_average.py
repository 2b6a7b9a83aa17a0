"""Means of real checkpoints, judged by torch's own sums in double precision, and by what opens them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptkit
from ckptkit.checkpoints.find_components import describe_not_copied
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.errors import CkptError, Corrupt, Mismatch, Occupied, Unsafe, Unsupported, Usage
from tests import producers
from tests.conftest import Produce
from tests.formats.contract import assert_same
from tests.producers import Truth, save_alone

Saved = dict[str, Tensor]


def saved(seed: int, dtype: torch.dtype = torch.float32) -> Saved:
    """A model that was trained a little differently."""
    torch.manual_seed(seed)
    shapes = {"embed.weight": (11, 6), "up.weight": (7, 6), "up.bias": (7,), "scale": (), "nothing": (0, 4)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def as_dcp(root: Path, state: Saved) -> Path:
    save_alone({"model": state, "optim": {"state": {"up.bias": {"exp_avg": torch.ones(7)}}}}, root)
    return root


def as_pt(root: Path, state: Saved) -> Path:
    root.mkdir()
    torch.save(state, root / "state.pt")
    return root


def as_hf(root: Path, state: Saved) -> Path:
    root.mkdir()
    save_file(state, root / "model.safetensors")
    return root


def mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Truth:
    """What torch makes of it in double precision."""
    sums = {
        name: torch.stack([weight * state[name].double() for weight, state in zip(weights, states, strict=True)])
        for name in states[0]
    }
    return {name: functools.reduce(torch.add, terms).to(states[0][name].dtype) for name, terms in sums.items()}


def test_of_any_formats_and_dtypes(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    states = [saved(i, kind) for i, kind in enumerate(kinds)]
    makers = (as_dcp, as_pt, as_hf)
    sources = [make(tmp_path / f"src{i}", state) for i, (make, state) in enumerate(zip(makers, states, strict=True))]
    weights = (0.5, 0.3, 0.2)
    done = ckptkit.average(sources, tmp_path / "out", weights=weights)
    assert (done.tensors, done.weights, done.sources) == (5, weights, tuple(sources))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(found, mean(states, weights))
    for name, tensor in mean([{name: t.float() for name, t in state.items()} for state in states], weights).items():
        torch.testing.assert_close(found[name], tensor)  # as float32 sums have it
    assert done.checked_bytes + done.unchecked_bytes == sum(t.nbytes for state in states for t in state.values())
    assert done.checked_bytes == sum(t.nbytes for state in states[:2] for t in state.values())
    ckptkit.average(sources[::-1], tmp_path / "other", weights=weights, jobs=3)
    assert_same(load_file(tmp_path / "other" / "model.safetensors"), mean(states[::-1], weights))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["hf", "dcp", "pt"])
def test_the_mean_of_one_with_itself_is_that_one(to: str, produce: Produce, tmp_path: Path) -> None:
    """Shards, ties, integers, booleans, 0-d: the model of a real training, to the last bit."""
    made = produce(producers.fsdp2)
    done = ckptkit.average([made.root] * 3, tmp_path / "out", to=to)
    weights = {name: tensor for name, tensor in made.truth.items() if name.startswith("model.")}
    if to == "hf":
        expected = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    elif to == "pt":
        found = torch.load(tmp_path / "out" / "state.pt")
        assert found.keys() == {"model"}
        assert_same({f"model.{name}": tensor for name, tensor in found["model"].items()}, weights)
    else:
        state = {name: torch.full_like(tensor, 0) for name, tensor in weights.items()}
        dcp.load(state, checkpoint_id=tmp_path / "out")
        assert_same(state, weights)
        assert done.world_size == 3
    assert [problem for part in ckptkit.verify(tmp_path / "out") for problem in part.problems] == []


def test_the_same_bytes_whatever_the_number_of_threads(tmp_path: Path) -> None:
    sources = [as_hf(tmp_path / f"src{i}", {"w": torch.randn(700_001)}) for i in range(3)]
    for jobs in (1, 3):
        ckptkit.average(sources, tmp_path / f"out{jobs}", jobs=jobs)
    one, other = ((tmp_path / f"out{jobs}" / "model.safetensors").read_bytes() for jobs in (1, 3))
    assert one == other


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints, and one that was never finished."""
    for step in (9, 10, 11, 12):
        as_dcp(tmp_path / "run" / f"ckpt-{step}", saved(step))
    (tmp_path / "run" / "ckpt-12" / ".metadata").unlink()
    return tmp_path / "run"


def test_the_last_of_a_run(run: Path, tmp_path: Path) -> None:
    done = ckptkit.average(run, tmp_path / "out", last=2)
    assert [path.name for path in done.sources] == ["ckpt-10", "ckpt-11"]
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), mean([saved(10), saved(11)], [0.5, 0.5]))
    assert [(left.name, left.entries) for left in done.dropped] == [("optim", 1)]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.source is not None
    assert manifest.source["mean"] == "0.5 x ckpt-10 + 0.5 x ckpt-11"


def test_state_of_the_training_is_not_taken_for_another_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    for step in (1, 2):
        optimizer = torch.optim.AdamW(model.parameters())
        ckptkit.Run(tmp_path / "run").save(step, model, optimizer, metrics={"loss": 1.0}, more={"a": 1})
    done = ckptkit.average(tmp_path / "run", tmp_path / "out", last=2)
    assert describe_not_copied(done.left_behind, "not copied") == ["not copied: metrics.json (training state)"]


def test_weights_are_divided_by_their_sum(run: Path, tmp_path: Path) -> None:
    done = ckptkit.average(run, tmp_path / "out", last=2, weights=[3, 1], to="pt")
    assert done.weights == (0.75, 0.25)
    assert done.notes[0] == "divided the factors by their sum, 4"
    assert_same(torch.load(tmp_path / "out" / "state.pt")["model"], mean([saved(10), saved(11)], [0.75, 0.25]))


def test_globs_dtype_and_a_file(run: Path, tmp_path: Path) -> None:
    done = ckptkit.average(run, tmp_path / "m.pt", last=3, include=["model.up.*"], dtype="bf16", to="pt")
    expected = mean([saved(step) for step in (9, 10, 11)], [1 / 3] * 3)
    chosen = {name: tensor.bfloat16() for name, tensor in expected.items() if name.startswith("up.")}
    found = torch.load(tmp_path / "m.pt")["model"]
    assert_same(found, chosen)
    assert set(done.cast.values()) == {"float32 => bfloat16"}


def test_integers_are_those_of_the_last_and_that_is_said(tmp_path: Path) -> None:
    states = [{"w": torch.ones(3), "seen": torch.tensor(i), "ids": torch.arange(3)} for i in (5, 7)]
    done = ckptkit.average([as_hf(tmp_path / f"src{i}", state) for i, state in enumerate(states)], tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), states[1])
    assert f"integers and booleans that differ come from {tmp_path / 'src1'}: seen" in done.notes


def tied(seed: int, *, as_one: bool) -> Saved:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    return {"embed": weight, "head": weight if as_one else weight + 1}


def test_ties_stay_ties(tmp_path: Path) -> None:
    sources = [as_pt(tmp_path / f"src{i}", tied(i, as_one=True)) for i in range(2)]
    ckptkit.average(sources, tmp_path / "out", to="pt")
    found = torch.load(tmp_path / "out" / "state.pt")
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert_same(found, mean([tied(0, as_one=True), tied(1, as_one=True)], [0.5, 0.5]))
    apart = as_pt(tmp_path / "apart", tied(1, as_one=False))
    with pytest.raises(Mismatch, match="tied to another one"):
        ckptkit.average([sources[0], apart], tmp_path / "two", to="pt")
    ckptkit.average([sources[0], apart], tmp_path / "two")
    expected = mean([tied(0, as_one=True), tied(1, as_one=False)], [0.5, 0.5])
    assert_same(load_file(tmp_path / "two" / "model.safetensors"), expected)


def test_a_head_that_only_some_have_written(tmp_path: Path) -> None:
    """A Hugging Face model leaves out what its config ties; a checkpoint of a training has it."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(LlamaForCausalLM(config))
    models[0].save_pretrained(tmp_path / "hf")
    save_alone({"model": dict(models[1].state_dict())}, tmp_path / "dcp")
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "dcp")
    expected = mean([model.state_dict() for model in models], [0.25, 0.75])
    for i, order in enumerate((("hf", "dcp"), ("dcp", "hf"))):
        weights = (0.25, 0.75) if i == 0 else (0.75, 0.25)
        ckptkit.average([tmp_path / name for name in order], tmp_path / f"out{i}", weights=weights)
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / f"out{i}")
        assert opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
        for name, tensor in opened.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    apart = dict(models[1].state_dict())
    apart["lm_head.weight"] = apart["lm_head.weight"] + 1
    save_alone({"model": apart}, tmp_path / "apart")
    with pytest.raises(Mismatch, match="ties it to"):
        ckptkit.average([tmp_path / "hf", tmp_path / "apart"], tmp_path / "out")


def changed(**changes: Tensor) -> Saved:
    return {**saved(1), **changes}


@dataclass(frozen=True)
class Case:
    """Something that is refused, and what is said."""

    other: Saved
    error: type[CkptError]
    said: str
    options: Mapping[str, Any]


E8 = torch.float8_e4m3fn
CASES = {
    "shape": Case(
        changed(**{"up.weight": torch.ones(6, 7)}), Mismatch, r"expected float32\[7,6\] .*, found float32\[6,7\]", {}
    ),
    "kind": Case(changed(scale=torch.tensor(1)), Mismatch, r"expected float32\[\] .*, found int64\[\]", {}),
    "more": Case(changed(more=torch.ones(1)), Mismatch, "has this tensor", {}),
    "fewer": Case({k: v for k, v in saved(1).items() if k != "scale"}, Mismatch, "has this tensor", {}),
    "too many weights": Case(saved(1), Usage, "one for each checkpoint, found 3", {"weights": [1, 1, 1]}),
    "negative": Case(saved(1), Usage, "positive", {"weights": [2, -1]}),
    "nan": Case(saved(1), Usage, "positive", {"weights": [2, float("nan")]}),
    "glob": Case(saved(1), Usage, "matches no tensor", {"include": ["nothing"]}),
    "last": Case(saved(1), Usage, "expected 1 run, found 2 paths", {"last": 2}),
    "too large": Case({k: v * 1e30 for k, v in saved(1).items()}, Unsupported, "cannot hold", {"dtype": "fp16"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_refused_leaves_nothing(case: Case, tmp_path: Path) -> None:
    sources = [as_dcp(tmp_path / "a", saved(0)), as_hf(tmp_path / "b", case.other)]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(case.error, match=case.said):
        ckptkit.average(sources, tmp_path / "out", **case.options)
    assert sorted(tmp_path.iterdir()) == before


def test_small_floats_are_averaged_only_if_equal(tmp_path: Path) -> None:
    states = [{"w": torch.full((3,), value).to(E8)} for value in (1.0, 1.0, 2.0)]
    sources = [as_hf(tmp_path / f"src{i}", state) for i, state in enumerate(states)]
    ckptkit.average(sources[:2], tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), states[0])
    with pytest.raises(Unsupported, match="float8_e4m3fn") as raised:
        ckptkit.average(sources, tmp_path / "two")
    assert raised.value.tensor == "w"


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_to_any_source_is_found(damaged: int, run: Path, tmp_path: Path) -> None:
    file = run / f"ckpt-{10 + damaged}" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    at = content.index(saved(10 + damaged)["embed.weight"].numpy().tobytes())
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(Corrupt) as raised:
        ckptkit.average(run, tmp_path / "out", last=2)
    assert (raised.value.path, raised.value.tensor) == (file, "embed.weight")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_source_that_is_replaced_meanwhile(which: int, run: Path, tmp_path: Path) -> None:
    victim = run / f"ckpt-{10 + which}"

    def replace(_done: int, _total: int) -> None:
        if victim.stat().st_ino == inode:
            victim.rename(run / "old")
            shutil.copytree(run / "old", victim)

    inode = victim.stat().st_ino
    with pytest.raises(CkptError, match="replaced while"):
        ckptkit.average(run, tmp_path / "out", last=2, jobs=1, progress=replace)  # another would miss a file
    assert not (tmp_path / "out").exists()


def test_destinations(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(Occupied):
        ckptkit.average(run, tmp_path / "out", last=2)
    with pytest.raises(Occupied, match="old"):  # which is not ours to replace
        ckptkit.average(run, tmp_path / "out", last=2, overwrite=True)
    (tmp_path / "out" / "old").unlink()
    ckptkit.average(run, tmp_path / "out", last=2, overwrite=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "ckptkit.json"}
    with pytest.raises(Unsafe):
        ckptkit.average(run, run / "ckpt-11" / "training", last=2)
    with pytest.raises(Usage, match="at least 2 checkpoints to average"):
        ckptkit.average([run], tmp_path / "new")
    with pytest.raises(Usage, match=r"expected at most 3 .*found 4"):
        ckptkit.average([run], tmp_path / "new", last=4)


def test_a_dry_run_writes_nothing(run: Path, tmp_path: Path) -> None:
    done = ckptkit.average(run, tmp_path / "new" / "out", last=3, dry_run=True)
    assert (done.dry_run, done.tensors, done.copies) == (True, 5, 15)
    assert done.files["model.safetensors"] > done.nbytes
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_config_goes_with_it(run: Path, tmp_path: Path) -> None:
    (run / "config.json").write_text(json.dumps({"model_type": "odd", "torch_dtype": "float32"}))
    ckptkit.average(run, tmp_path / "out", last=2, dtype="bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


HEADS = {
    "model_type": "odd",
    "num_attention_heads": 4,
    "architectures": ["OddModel"],
    "rope_theta": 1e4,
    "rope_local_base_freq": 1e4,
}


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 2},
        {"model_type": "even"},
        {"architectures": ["EvenModel"]},
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_local_base_freq": 5e3},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}},
        {"text_config": {"head_dim": 16}},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("to", ["hf", "pt"])
def test_models_that_compute_otherwise(change: dict[str, Any], to: str, tmp_path: Path) -> None:
    """Heads and rope change no shape: config.json says what they are."""
    sources = [as_hf(tmp_path / name, saved(i)) for i, name in enumerate("ab")]
    for source, more in zip(sources, ({"text_config": {"head_dim": 8}}, change), strict=True):
        (source / "config.json").write_text(json.dumps({**HEADS, **more}))
    with pytest.raises(Mismatch, match=f"expected .* as in {sources[0]}, found") as raised:
        ckptkit.average(sources, tmp_path / "out", to=to)
    assert raised.value.path == sources[1]
    assert not (tmp_path / "out").exists()


def test_configs_of_one_model(tmp_path: Path) -> None:
    """FSDP's class, another version's rope, null and what decides nothing are no differences; some have no config."""
    configs = [
        HEADS,
        None,
        {**HEADS, "architectures": ["FSDPOddModel"], "use_cache": False, "head_dim": None, "torch_dtype": "float16"},
        {**HEADS, "rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "head_dim": 8},
    ]
    sources = [as_hf(tmp_path / str(i), saved(i)) for i in range(len(configs))]
    for source, config in zip(sources, configs, strict=True):
        if config is not None:
            (source / "config.json").write_text(json.dumps(config))
    done = ckptkit.average(sources, tmp_path / "out")
    assert done.tensors == 5
    assert not any("the dtype of" in note for note in done.notes)


def test_whose_dtypes_it_has_is_said(tmp_path: Path) -> None:
    kinds = (torch.bfloat16, torch.float32)
    sources = [as_hf(tmp_path / f"src{i}", saved(i, kind)) for i, kind in enumerate(kinds)]
    done = ckptkit.average(sources, tmp_path / "out")
    assert any(f"5 tensors have the dtype of {sources[0]}" in note and "float32" in note for note in done.notes)
    chosen = ckptkit.average(sources, tmp_path / "chosen", dtype="fp32")
    assert not any("the dtype of" in note for note in chosen.notes)
    first = next(iter(saved(0)))
    chosen = ckptkit.average(sources, tmp_path / "some", dtype=f"{first}=fp32")
    assert any(f"4 tensors have the dtype of {sources[0]}" in note for note in chosen.notes)


@pytest.mark.parametrize("described", [0, 1])
def test_what_no_config_tells_is_said(tmp_path: Path, described: int) -> None:
    sources = [as_hf(tmp_path / f"src{i}", saved(i)) for i in range(2)]
    for source in sources[:described]:
        (source / "config.json").write_text(json.dumps(HEADS))
    done = ckptkit.average(sources, tmp_path / "out")
    said = f"{2 - described} of 2 sources have no config.json, so their heads and rope were not compared"
    assert said in done.notes
