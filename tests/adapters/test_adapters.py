"""Adapters out of real trainings under FSDP2, byte for byte as PEFT saves them, and loaded by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.errors import Mismatch, NotACheckpoint, Unsupported, Usage
from tests.conftest import Produce

pytest.importorskip("peft", reason="PEFT is the judge of adapters")

from tests.trainers.produced_peft import CONFIG, adapted, fill, lora, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # the library's own

WEIGHTS, SAID = "adapter_model.safetensors", "adapter_config.json"
RUNS = ("run", "run/checkpoint-3/pytorch_model_fsdp_0", "only/checkpoint-3", "ranks", "full", "full/state.pt", "saved")


@pytest.fixture
def home(produce: Produce) -> Path:
    """The trainings of one model with an adapter, and what PEFT saved of it."""
    return produce(lora).root


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_the_directory_is_that_of_save_pretrained(home: Path, tmp_path: Path, run: str) -> None:
    """Shards, files of ranks, one file, the adapter alone, and what PEFT itself has saved."""
    done = ckptkit.consolidate(home / run, tmp_path / "out")
    for file in (WEIGHTS, SAID):
        assert (tmp_path / "out" / file).read_bytes() == (home / "saved" / file).read_bytes()
    assert any("--merge" in note for note in done.notes)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {WEIGHTS, SAID, "ckptkit.json"}
    assert [problem for part in ckptkit.verify(tmp_path / "out") for problem in part.problems] == []


def test_the_library_loads_it(home: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    ckptkit.consolidate(home / "run", tmp_path / "out")
    model = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "out"))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(tiny_llama(), str(home / "saved"))(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("run", ["run", "ranks", "saved", "full"])
def test_inspect_says_what_it_is(home: Path, run: str) -> None:
    (found,) = ckptkit.inspect(home / run).adapters
    assert (found.name, found.method, found.rows, found.alpha, found.modules) == ("default", "LoRA", (2, 4), 7, 4)
    assert (sorted(found.targets), found.replaced) == (["down_proj", "q_proj"], ("lm_head.weight",))
    assert found.has_base == (run != "saved")
    assert found.config is not None
    assert found.parameters == sum(t.numel() for t in load_file(home / "saved" / WEIGHTS).values())


def state(root: Path, *adapters: str, **config: Any) -> Path:
    """The state of a model with adapters in training, in one file, and their configs as PEFT saves them."""
    first, *others = adapters or ("default",)
    model = adapted(tiny_llama(), first, **(CONFIG | config))
    for i, name in enumerate(others):
        from peft import LoraConfig

        model.add_adapter(
            name, LoraConfig(**(CONFIG | config | {"modules_to_save": None, "r": 6 + i, "rank_pattern": {}}))
        )
    fill(model)
    model.save_pretrained(root / "saved")
    (root / "state").mkdir()
    torch.save({"model": model.state_dict()}, root / "state" / "state.pt")
    for path in (root / "saved").rglob(SAID):
        there = root / "state" / path.relative_to(root / "saved")
        there.parent.mkdir(exist_ok=True)
        shutil.copy(path, there)
    return root / "state"


def test_several_adapters_lie_as_the_library_lays_them(tmp_path: Path) -> None:
    """That called `default` on top, others in folders, each with its config."""
    src = state(tmp_path, "default", "other", "third")
    ckptkit.consolidate(src, tmp_path / "out")
    files = [path.relative_to(tmp_path / "saved") for path in (tmp_path / "saved").rglob("adapter_*")]
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes(), file
    assert [adapter.name for adapter in ckptkit.inspect(src).adapters] == ["default", "other", "third"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_with_more_rows_than_the_base_come_along(tmp_path: Path, is_tied: bool) -> None:
    """The new rows lie nowhere else; PEFT finds them so, and loads them onto a base that was made larger."""
    from transformers import LlamaForCausalLM

    tiny_llama(tie_word_embeddings=is_tied).save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(44)
    model = adapted(model, **(CONFIG | {"modules_to_save": None}))
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "state").mkdir()
    torch.save({"model": model.state_dict()}, tmp_path / "state" / "state.pt")
    shutil.copy(tmp_path / "saved" / SAID, tmp_path / "state")
    ckptkit.consolidate(tmp_path / "state", tmp_path / "out")
    assert "base_model.model.lm_head.weight" in load_file(tmp_path / "out" / WEIGHTS)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "saved" / WEIGHTS).read_bytes()
    done = ckptkit.merge(tmp_path / "base", tmp_path / "out", tmp_path / "merged")
    assert any("vocab_size" in note and "44" in note for note in done.notes)


def test_without_a_config_it_says_what_is_missing(tmp_path: Path) -> None:
    src = state(tmp_path)
    given = (src / SAID).rename(tmp_path / "given.json")
    with pytest.raises(NotACheckpoint, match="alpha") as raised:
        ckptkit.consolidate(src, tmp_path / "out")
    assert "ranks 2 to 4 on q_proj, down_proj" in raised.value.message
    assert "--adapter-config" in (raised.value.hint or "")
    ckptkit.consolidate(src, tmp_path / "out", adapter_config=given)
    assert (tmp_path / "out" / SAID).read_bytes() == given.read_bytes()
    values = json.loads(given.read_bytes())
    given.write_text(json.dumps(values | {"inference_mode": False}))
    ckptkit.consolidate(src, tmp_path / "other", adapter_config=given)
    assert json.loads((tmp_path / "other" / SAID).read_bytes()) == values


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"r": 8}, "found rank 4"),
        ({"rank_pattern": {}}, "found rank 2"),
        ({"target_modules": ["q_proj"]}, "expected a target of"),
        ({"use_dora": True}, "magnitudes"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"layers_to_transform": [1, 2]}, r"layers \[1, 2\]"),
        ({"modules_to_save": ["classifier"]}, "tensors of classifier"),
        ({"trainable_token_indices": [1]}, "token rows"),
    ],
)
def test_a_config_of_another_adapter_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    src = state(tmp_path)
    values = json.loads((src / SAID).read_bytes())
    (src / SAID).write_text(json.dumps(values | change))
    with pytest.raises(Mismatch, match=word) as raised:
        ckptkit.consolidate(src, tmp_path / "out")
    assert raised.value.tensor is not None
    assert not (tmp_path / "out").exists()


def test_half_an_adapter_is_refused(tmp_path: Path) -> None:
    src = state(tmp_path)
    with pytest.raises(Mismatch, match="the matching lora_A"):
        ckptkit.consolidate(src, tmp_path / "out", exclude="*0.self_attn.q_proj.lora_A*")


def test_one_config_is_not_that_of_two(tmp_path: Path) -> None:
    src = state(tmp_path, "default", "other")
    with pytest.raises(Usage, match="each of 2 adapters, found one: default, other"):
        ckptkit.consolidate(src, tmp_path / "out", adapter_config=src / SAID)
    ckptkit.consolidate(src, tmp_path / "one", adapter_config=src / SAID, exclude="*.other*")
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "saved" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_the_mean_of_adapters_is_refused(home: Path, tmp_path: Path, to: str) -> None:
    with pytest.raises(Unsupported, match="adapters"):
        ckptkit.average([home / "saved", home / "full"], tmp_path / "out", to=to)


def test_other_methods_are_refused(tmp_path: Path) -> None:
    """Which would be written under the names of a wrapper, for nobody to load."""
    save_file({"base_model.model.q_proj.ia3_l.default": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match="IA3"):
        ckptkit.consolidate(tmp_path, tmp_path / "out")


def test_methods_that_only_their_config_names_are_refused(tmp_path: Path) -> None:
    """Names tell of no new method what it is; in PEFT's wrapper they are no model's."""
    save_file({"base_model.model.q_proj.deft_P": torch.ones(4)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / SAID).write_text('{"peft_type": "DEFT"}')
    for do in (ckptkit.consolidate, lambda src, out: ckptkit.merge(src, src, out)):
        with pytest.raises(Unsupported, match="DEFT") as raised:
            do(tmp_path, tmp_path / "out")
    assert raised.value.tensor == "base_model.model.q_proj.deft_P"


def test_a_wrapped_base_alone_is_no_model(home: Path, tmp_path: Path) -> None:
    """Without the adapter its names are those of the wrapper, unless they are made the model's."""
    shutil.copy(home / "full" / "state.pt", tmp_path)
    exclude = ["*lora_*", "*modules_to_save*"]
    with pytest.raises(Unsupported, match="the name has PEFT's prefix"):
        ckptkit.consolidate(tmp_path / "state.pt", tmp_path / "out", exclude=exclude)
    rules = [r"^base_model\.model\.=>", r"\.(base_layer|original_module)\.=>."]
    ckptkit.consolidate(tmp_path / "state.pt", tmp_path / "out", exclude=exclude, rename=rules)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tiny_llama().state_dict().keys()


def test_a_base_that_the_training_changed_is_said(tmp_path: Path) -> None:
    src = state(tmp_path)
    values = json.loads((src / SAID).read_bytes())
    (src / SAID).write_text(json.dumps(values | {"init_lora_weights": "pissa_niter_4"}))
    done = ckptkit.consolidate(src, tmp_path / "out")
    assert any("modified the base before the first step (pissa_niter_4)" in note for note in done.notes)


@pytest.mark.parametrize("to", ["pt", "dcp"])
def test_a_training_converted_keeps_all_names(home: Path, tmp_path: Path, to: str) -> None:
    ckptkit.convert(home / "full", tmp_path / "out", to=to)
    assert ckptkit.diff(home / "full", tmp_path / "out").is_equal
    assert (tmp_path / "out" / SAID).exists()


def test_patterns_mean_what_they_mean_of_a_model(home: Path, tmp_path: Path) -> None:
    """A glob or a rule that matched nothing was ignored, and globs were of the output's names only."""
    dtype = ["*q_proj.lora_A.default.weight=bf16", "*down_proj.lora_A.weight=fp16"]
    ckptkit.consolidate(home / "run", tmp_path / "out", dtype=dtype)
    found = {name: str(tensor.dtype) for name, tensor in load_file(tmp_path / "out" / WEIGHTS).items()}
    expected = {"q_proj.lora_A": "torch.bfloat16", "down_proj.lora_A": "torch.float16"}
    assert found == {name: expected.get(".".join(name.split(".")[-3:-1]), "torch.float32") for name in found}
    with pytest.raises(Usage, match=r"rename='foo=>bar' matches no tensor"):
        ckptkit.consolidate(home / "run", tmp_path / "no", rename="foo=>bar")
    with pytest.raises(Usage, match=r"dtype='foo\*' matches no tensor"):
        ckptkit.consolidate(home / "run", tmp_path / "no", dtype="foo*=bf16")
    assert not (tmp_path / "no").exists()


def test_the_tokenizer_beside_it_comes_along(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "saved", tmp_path / "src")
    (tmp_path / "src" / "tokenizer.json").write_text("{}")
    (tmp_path / "src" / "vocab.txt").symlink_to("/etc/hostname")
    ckptkit.consolidate(tmp_path / "src", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "vocab.txt").exists()
