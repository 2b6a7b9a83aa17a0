"""Adapters under the names of Megatron's trainers: merged there by their formula, and here under the Hub's names.

The names are those that Megatron-Bridge 0.3.1's own LoRA and CanonicalLoRA gave to a Megatron-Core model and its
`sharded_state_dict`; the formula is that of its `LoRAMerge.merge`. Bridge itself needs Transformer Engine, so a GPU.
"""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import ckptkit
from ckptkit.errors import CkptError

transformers = pytest.importorskip("transformers", reason="transformers makes the base")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 3, 7
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
HEADS, GROUPS, WIDTH = 8, 4, 10
RUN = """checkpoint:
  save: /runs/1
peft:
  _target_: {target}
  alpha: {alpha}
  dim: {dim}
  dropout: 0.0
  target_modules:
  - linear_qkv
train:
  dim: 99
"""
Weights = dict[str, Tensor]


def save(root: Path, tensors: Mapping[str, Tensor], target: str | None = "lora.LoRA") -> Path:
    """A checkpoint as Megatron writes one, with the config of Megatron-Bridge."""
    root.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(dict(tensors), checkpoint_id=root, planner=planner, no_dist=True)
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    if target:
        text = RUN.format(target=f"megatron.bridge.peft.{target}", alpha=ALPHA, dim=RANK)
        (root / "run_config.yaml").write_text(text)
    return root


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """A model on the Hub, and its weights as Megatron has them."""
    home = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": WIDTH}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(request.param, **sizes, **heads)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / "hub")
    ckptkit.convert(home / "hub", home / "megatron", to="dcp", names="megatron")
    return home / "hub", {name: tensor.torch() for name, tensor in ckptkit.open(home / "megatron").items()}


def adapter_of(weights: Weights) -> tuple[Weights, Weights]:
    """Matrices for the linear layers of all layers, and the weights with these merged: `alpha / dim * (out @ in)`."""
    matrices: Weights = {}
    merged = dict(weights)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            a, b = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
            matrices |= {f"{module}.adapter.linear_in.weight": a, f"{module}.adapter.linear_out.weight": b}
            merged[name] = weight + ALPHA / RANK * (b @ a)
    return matrices, merged


def stacked(tensors: Weights) -> Weights:
    """With layers that are alike as one tensor, as `torch_dist` has them by default."""
    found = defaultdict(list)
    for name in sorted(tensors):
        found[re.sub(r"layers\.\d+\.", "layers.", name)].append(tensors[name])
    return {name: torch.stack(one) for name, one in found.items()}


def by_swift(tensors: Weights) -> Weights:
    """As ms-swift names them, which has PEFT on Megatron's modules."""
    pairs = {".adapter.linear_in.": ".lora_A.default.", ".adapter.linear_out.": ".lora_B.default."}
    return {name.replace(old, pairs[old]): one for name, one in tensors.items() for old in pairs if old in name}


def assert_same(found: Path, wanted: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-6)


def merged_on_the_hub(root: Path, merged: Weights, hub: Path) -> Path:
    ckptkit.consolidate(save(root / "merged", merged, None), root / "truth", base=hub)
    return root / "truth"


@pytest.mark.parametrize("form", ["stacked", "numbered", "swift"])
def test_an_adapter_of_megatron(tmp_path: Path, base: tuple[Path, Weights], form: str) -> None:
    hub, weights = base
    matrices, merged = adapter_of(weights)
    forms: dict[str, Callable[[Weights], Weights]] = {"stacked": stacked, "numbered": dict, "swift": by_swift}
    adapter = save(tmp_path / "iter_0000003", forms[form](matrices), None if form == "swift" else "lora.LoRA")
    if form == "swift":
        said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}
        (adapter / "adapter_config.json").write_text(json.dumps(said))
    truth = merged_on_the_hub(tmp_path, merged, hub)
    ckptkit.consolidate(adapter, tmp_path / "peft", base=hub)
    ckptkit.merge(hub, tmp_path / "peft", tmp_path / "out")
    assert_same(tmp_path / "out", truth)
    ckptkit.consolidate(adapter, tmp_path / "at-once", merge=True, base=hub)
    assert_same(tmp_path / "at-once", truth)
    peft = pytest.importorskip("peft", reason="PEFT loads the adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(hub)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "peft").merge_and_unload().state_dict()
    for name, tensor in load_file(truth / "model.safetensors").items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_run_of_swift(tmp_path: Path, base: tuple[Path, Weights]) -> None:
    """The tree and names of a save of ms-swift 4.6.0 by Megatron-Core 0.16.1: `checkpoint-3/iter_0000003`, `common.pt`.

    Its arguments say rank and alpha, and the head was trained whole, with the rows that pad the vocabulary.
    """
    hub, weights = base
    matrices, merged = adapter_of(weights)
    head = torch.randn(44, 32)
    whole = {"output_layer.modules_to_save.default.weight": head}
    step = save(tmp_path / "run/checkpoint-3/iter_0000003", {**stacked(by_swift(matrices)), **whole}, None)
    args = Namespace(lora_rank=RANK, lora_alpha=ALPHA, use_rslora=False, tuner_type="lora", swiglu=True)
    torch.save({"args": args, "iteration": 3}, step / "common.pt")
    (step.parent / "args.json").write_text('{"swift_version": "4.6.0"}')
    (step.parent / "latest_checkpointed_iteration.txt").write_text("3")
    (found,) = ckptkit.ls(tmp_path / "run").checkpoints
    assert (found.path.name, found.is_complete, found.trainer) == ("checkpoint-3", True, "ms-swift, by Megatron")
    (seen,) = ckptkit.inspect(tmp_path / "run").adapters
    assert (seen.rows, seen.alpha) == ((RANK,), ALPHA)
    truth = merged_on_the_hub(tmp_path, {**merged, "output_layer.weight": head[:40].contiguous()}, hub)
    ckptkit.merge(hub, tmp_path / "run", tmp_path / "out")
    assert_same(tmp_path / "out", truth)
    done = ckptkit.consolidate(tmp_path / "run", tmp_path / "peft", base=hub)
    assert not [left for left in done.left_behind if not left.is_expected]
    ckptkit.merge(hub, tmp_path / "peft", tmp_path / "again")
    assert_same(tmp_path / "again", truth)


def test_canonical_lora_has_matrices_for_each_projection(tmp_path: Path, base: tuple[Path, Weights]) -> None:
    """Its forward interleaves queries, keys and values by group (`_interleave_qkv`), and joins gate and up."""
    hub, weights = base
    matrices: Weights = {}
    merged = dict(weights)
    rows = {
        "linear_qkv": {"q": HEADS * WIDTH, "k": GROUPS * WIDTH, "v": GROUPS * WIDTH},
        "linear_fc1": {"gate": 24, "up": 24},
    }
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        parts = {}
        for part, count in rows.get(module.rpartition(".")[2], {}).items():
            a, b = torch.randn(RANK, weight.shape[1]), torch.randn(count, RANK)
            place = f"{module}.adapter.adapter_{part}"
            matrices |= {f"{place}.linear_in.weight": a, f"{place}.linear_out.weight": b}
            parts[part] = ALPHA / RANK * (b @ a)
        if "q" in parts:
            q, k, v = (parts[part].reshape(GROUPS, -1, WIDTH, weight.shape[1]) for part in "qkv")
            merged[name] = weight + torch.cat([q, k, v], 1).reshape(weight.shape)
        elif parts:
            merged[name] = weight + torch.cat([parts["gate"], parts["up"]])
    truth = merged_on_the_hub(tmp_path, merged, hub)
    for form in (stacked, dict):
        adapter = save(tmp_path / form.__name__, form(matrices), "canonical_lora.CanonicalLoRA")
        ckptkit.merge(hub, adapter, tmp_path / f"of-{form.__name__}", base=hub)
        assert_same(tmp_path / f"of-{form.__name__}", truth)


def test_what_is_missing_or_unknown_is_refused(tmp_path: Path, base: tuple[Path, Weights]) -> None:
    hub, weights = base
    matrices, _ = adapter_of(weights)
    first = next(iter(matrices))
    experts = {name.replace("mlp.", "mlp.experts."): tensor for name, tensor in matrices.items()}
    two = {name.replace(".default.", ".other."): one for name, one in by_swift(matrices).items()}
    without = {name: tensor for name, tensor in matrices.items() if name != first}
    other_rows = {**matrices, next(one for one in matrices if "qkv" in one and "out" in one): torch.zeros(7, RANK)}
    magnitude = {**matrices, first.replace("linear_in.weight", "weight_magnitude"): torch.zeros(7)}
    cases = [
        (matrices, "lora.LoRA", None, "the names are Megatron's"),
        (matrices, None, hub, "alpha is unknown"),
        (matrices, "dora.DoRA", hub, "expected LoRA of Megatron-Bridge, found megatron.bridge.peft.dora.DoRA"),
        (magnitude, "lora.LoRA", hub, "expected linear_in and linear_out of LoRA"),
        (without, "lora.LoRA", hub, "the other of the two matrices is missing"),
        (experts, "lora.LoRA", hub, "an adapter of experts under Megatron's names"),
        ({**by_swift(matrices), **two}, "lora.LoRA", hub, "expected one adapter under Megatron's names"),
        (
            {**by_swift(matrices), "embedding.word_embeddings.lora_embedding_A.default": torch.zeros(RANK, 9)},
            "lora.LoRA",
            hub,
            "expected LoRA of linear layers in an adapter of ms-swift",
        ),
        (
            other_rows,
            "lora.LoRA",
            hub,
            r"linear_qkv.adapter.linear_out.weight`: .* heads of 10 \(config.json\), found 7 rows",
        ),
    ]
    for number, (tensors, target, given, message) in enumerate(cases):
        adapter = save(tmp_path / f"run-{number}", tensors, target)
        with pytest.raises(CkptError, match=message):
            ckptkit.consolidate(adapter, tmp_path / "never", base=given)
        assert not (tmp_path / "never").exists()
    broken = save(tmp_path / "broken", matrices)
    (broken / "run_config.yaml").write_text(RUN.format(target="megatron.bridge.peft.lora.LoRA", alpha="?", dim=3))
    with pytest.raises(CkptError, match="expected numbers for dim and alpha"):
        ckptkit.consolidate(broken, tmp_path / "never", base=hub)
