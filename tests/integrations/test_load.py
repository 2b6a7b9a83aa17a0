"""Models that transformers loads straight from checkpoints: bit for bit those that it loads of the converted ones."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptkit.checks.open import HubModel
from ckptkit.conversion.convert import consolidate, convert
from ckptkit.errors import Corrupt, Mismatch, Unsupported
from tests.conftest import Produce
from tests.faults.server import Server
from tests.integrations.produced_models import KINDS, SHARDS, llama_of_zero, sharded_models
from tests.process_io import bytes_read, needs_counts
from tests.producers import save_alone, spawn
from tests.s3 import S3, forget, serve_s3
from tests.tiers import nightly_but
from tests.trainers.produced_megatron_models import megatron_models
from tests.trainers.produced_peft import lora, tiny_llama

transformers = pytest.importorskip("transformers")

from ckptkit.integrations.transformers import (  # noqa: E402
    LazyStateDict,
    from_lazy_state_dict,
    lazy_state_dict,
    load,
)

pytestmark = pytest.mark.slow

IDS = torch.arange(1, 21)[None]
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}


def logits_of(model: Any) -> Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, **more).logits
    return found


def assert_same(ours: Any, theirs: Any) -> None:
    """Two models are the same: class, configs, tensors, and what they compute."""
    assert type(ours) is type(theirs)
    assert ours.config.to_diff_dict() | {"_name_or_path": ""} == theirs.config.to_diff_dict() | {"_name_or_path": ""}
    if ours.can_generate():
        assert ours.generation_config == theirs.generation_config
    one, two = ours.state_dict(), theirs.state_dict()
    assert one.keys() == two.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, two[name])] == []
    assert torch.equal(logits_of(ours), logits_of(theirs))


def consolidated(source: Path, out: Path, **options: Any) -> Any:
    """What transformers loads once a checkpoint is converted."""
    consolidate(source, out, **options)
    config = transformers.AutoConfig.from_pretrained(out)
    (name,) = config.architectures or ["AutoModelForCausalLM"]
    return getattr(transformers, name).from_pretrained(out)


@pytest.mark.parametrize("kind", nightly_but(["llama", "mixtral"], KINDS))
def test_shards_of_each_family(produce: Produce, tmp_path: Path, kind: str) -> None:
    made = produce(sharded_models)
    model = load(made.root / kind)
    assert all(torch.equal(tensor, made.truth[f"{kind}:{name}"]) for name, tensor in model.state_dict().items())
    assert_same(model, consolidated(made.root / kind, tmp_path / "out"))
    assert model.name_or_path == str(made.root / kind / SHARDS)


TITAN = ("dcp", {"names": "torchtitan", "under": "model", "world_size": 3})
WAYS = [
    *(TITAN, ("dcp", {"names": "torchtune"}), ("pt", {}), ("ranks", {"world_size": 2, "under": "model"})),
    ("hf", {"max_shard_size": 20_000}),
]


@pytest.mark.parametrize(("to", "options"), nightly_but([TITAN], WAYS))
def test_each_format(produce: Produce, tmp_path: Path, to: str, options: dict[str, Any]) -> None:
    source = tmp_path / "source"
    consolidate(produce(sharded_models).root / "llama", source)
    convert(source, tmp_path / "made", to=to, **options)
    shutil.copy(source / "config.json", tmp_path)
    assert_same(load(tmp_path / "made"), consolidated(tmp_path / "made", tmp_path / "out"))


@pytest.mark.parametrize("stage", nightly_but(["zero3"], ["zero1", "zero3"]))
def test_deepspeed(produce: Produce, tmp_path: Path, stage: str) -> None:
    made = produce(llama_of_zero)
    model = load(made.root / stage)
    assert all(torch.equal(tensor, made.truth[f"{stage}:{name}"]) for name, tensor in model.named_parameters())
    assert_same(model, consolidated(made.root / stage, tmp_path / "out"))
    rounded = load(made.root / stage, dtype="bfloat16")
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.lm_head.weight, model.lm_head.weight.bfloat16())


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["llama/whole", "mixtral/whole"])
def test_megatron(produce: Produce, tmp_path: Path, place: str) -> None:
    root = produce(megatron_models).root / place
    assert_same(load(root, base=root.parent), consolidated(root, tmp_path / "out", base=root.parent))


def test_an_adapter_is_merged_into_its_base(produce: Produce, tmp_path: Path) -> None:
    made = produce(lora)
    for run in ("run", "saved", "full"):
        model = load(made.root / run, base=made.root / "base")
        assert_same(model, consolidated(made.root / run, tmp_path / run, merge=True, base=made.root / "base"))
        assert all(torch.equal(tensor, made.truth[name]) for name, tensor in model.state_dict().items())
    for name, part in lazy_state_dict(made.root / "run", base=made.root / "base").items():
        whole = made.truth[name]
        assert torch.equal(part[1:5], whole[1:5]), name
        assert torch.equal(part[..., 2:7], whole[..., 2:7]), name


def test_from_a_store_no_more_is_read_than_the_model(
    produce: Produce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = produce(sharded_models).root / "mixtral" / SHARDS
    model = load(root)
    with serve_s3(tmp_path / "stores") as s3:
        shutil.copytree(root, s3.root / "bucket" / "run" / SHARDS)
        use(s3, monkeypatch)
        s3.requests.clear()
        assert_same(load("s3://bucket/run"), model)
        read = sum(request.sent for request in s3.requests)
        assert read < 1.2 * sum(file.stat().st_size for file in root.iterdir())
    forget()


def use(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    forget()


def test_slices_read_their_own_bytes(produce: Produce) -> None:
    root = produce(sharded_models).root / "mixtral"
    state = lazy_state_dict(root)
    name = "model.layers.0.mlp.experts.1.w1.weight"
    one = next(found for found in (name, name.replace(".mlp.", ".block_sparse_moe.")) if found in state)
    part = state[one]
    assert part.get_shape() == list(part.shape)
    assert (part.get_dtype(), part.dtype, part.is_floating_point()) == ("F32", torch.float32, True)
    assert torch.equal(part[...][1:3, 2:], part[1:3, 2:])
    assert torch.equal(part[...][0], part[0])
    with pytest.raises(KeyError):
        state["model.layers.0.nothing"]
    with pytest.raises(TypeError):
        state[one] = part  # type: ignore[index]


# -- ranks -------------------------------------------------------------------------------------------------------------


def _load_in_parallel(source: Path, out: Path) -> None:
    """Load a model in parts, count the bytes, and compare with what transformers loads of the converted one."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=2, tp_plan="auto")
    load(source, distributed_config=config)  # imports what is imported once
    before = bytes_read()
    model = load(source, distributed_config=config)
    read = bytes_read() - before
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, distributed_config=config)
    ours, others = model.state_dict(), theirs.state_dict()
    cut = 0
    for name, tensor in ours.items():
        assert torch.equal(local(tensor), local(others[name])), name
        cut += local(tensor).numel() < tensor.numel()
    assert cut > 10
    assert torch.equal(logits_of(model), logits_of(theirs))
    needed = sum(bytes_needed(tensor) for tensor in ours.values())
    (out / f"read-{dist.get_rank()}.json").write_text(json.dumps({"read": read, "needed": needed}))


def bytes_needed(tensor: Tensor) -> int:
    """The bytes of a rank's rows of a tensor, and of whole rows where it has some of the columns."""
    has_columns = isinstance(tensor, DTensor) and tensor.placements[0].is_shard(tensor.ndim - 1)
    return (tensor if has_columns else local(tensor)).numel() * tensor.itemsize


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@needs_counts
@pytest.mark.parametrize("kind", nightly_but(["mixtral"], ["llama", "mixtral"]))
def test_ranks_read_their_own_slices(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    config_class = {"llama": transformers.LlamaConfig, "mixtral": transformers.MixtralConfig}[kind]
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SIZES, **heads, **more))
    save_alone({"model": dict(model.state_dict())}, tmp_path / "ckpt-1")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "ckpt-1")
    consolidate(tmp_path / "ckpt-1", tmp_path / "out")
    spawn(2, _load_in_parallel, tmp_path / "ckpt-1", tmp_path / "out")
    nbytes = sum(one.numel() * one.itemsize for one in model.state_dict().values())
    for rank in range(2):
        found = json.loads((tmp_path / "out" / f"read-{rank}.json").read_text())
        assert found["needed"] < 0.8 * nbytes
        assert found["read"] < 1.05 * found["needed"], found


def _load_sharded(source: Path, out: Path) -> None:
    """Load a model into FSDP's shards."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=2)
    model = load(source, distributed_config=config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, distributed_config=config)
    others = theirs.state_dict()
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(local(tensor), local(others[name])), name


@pytest.mark.nightly
def test_fsdp_gets_its_shards(produce: Produce, tmp_path: Path) -> None:
    source = produce(sharded_models).root / "llama"
    consolidate(source, tmp_path / "out")
    spawn(2, _load_sharded, source, tmp_path / "out")


# -- memory ------------------------------------------------------------------------------------------------------------


def _measure(whose: str, place: str, dtype: str) -> None:
    """Print by how much the peak of this process grows while it loads a model, in KiB."""

    def peak() -> int:  # of this program: rusage begins with that of the one that started it
        return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))

    before = peak()
    model = (load if whose == "ours" else transformers.LlamaForCausalLM.from_pretrained)(place, dtype=dtype)
    sys.stdout.write(str(peak() - before))
    assert model.dtype == getattr(torch, dtype)


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells the peak on Linux")
def test_memory_beside_from_pretrained(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "head_dim": 32}
    model = tiny_llama(**SIZES | {"intermediate_size": 8192, "num_hidden_layers": 6}, **heads)
    nbytes = sum(one.numel() * one.itemsize for one in model.state_dict().values())
    save_alone({"model": dict(model.state_dict())}, tmp_path / "ckpt-1")
    model.config.save_pretrained(tmp_path / "ckpt-1")
    consolidate(tmp_path / "ckpt-1", tmp_path / "out")
    used: dict[str, float] = {}
    places = {"ours": tmp_path / "ckpt-1", "theirs": tmp_path / "out"}
    with Server(__name__) as server:
        for name in ("ours float32", "ours bfloat16", "theirs bfloat16"):
            whose, dtype = name.split()
            done = server.run(f"{__name__}:_measure", [whose, str(places[whose]), dtype], timeout=300)
            assert done.code == 0, done.err
            used[name] = int(done.out) * 1024 / nbytes
    assert used["ours float32"] < 1.2, used  # theirs is mapped, and in memory as far as it is used
    assert used["theirs bfloat16"] > 0.5, used
    assert used["ours bfloat16"] < used["theirs bfloat16"] + 0.2, used


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(produce: Produce, tmp_path: Path) -> Path:
    """A checkpoint of two ranks that a test may change."""
    shutil.copytree(produce(sharded_models).root / "llama" / SHARDS, tmp_path / SHARDS)
    return tmp_path / SHARDS


def change_config(place: Path, **change: Any) -> None:
    config = json.loads((place / "config.json").read_text()) | change
    (place / "config.json").write_text(json.dumps(config))


def test_without_a_config_there_is_a_hint(llama: Path, tmp_path: Path) -> None:
    (llama / "config.json").rename(tmp_path / "away.json")
    with pytest.raises(Mismatch, match=r"expected a config\.json in the checkpoint or its run, found none") as raised:
        load(llama)
    assert "base=MODEL" in (raised.value.hint or "")
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "away.json").rename(base / "config.json")
    assert load(llama, base=base).config.model_type == "llama"


def test_an_unknown_type_of_models_is_named(llama: Path) -> None:
    change_config(llama, model_type="of_their_own", architectures=["OfTheirOwn"])
    with pytest.raises(Unsupported, match="of_their_own"):
        load(llama)


def test_missing_tensors_are_no_random_numbers(llama: Path) -> None:
    change_config(llama, num_hidden_layers=3)
    with pytest.raises(Mismatch, match="missing: the checkpoint lacks 9 of") as raised:
        load(llama)
    assert raised.value.tensor is not None
    assert ".layers.2." in raised.value.tensor


def test_what_only_transformers_misses_is_an_error_too(llama: Path) -> None:
    opened = HubModel.open(llama)
    state = LazyStateDict(replace(opened, tensors=opened.tensors.select("model.*s.*")))
    with pytest.raises(Mismatch, match=r"missing: `LlamaForCausalLM` needs model\.norm\.weight") as raised:
        from_lazy_state_dict(state, {})
    assert raised.value.tensor == "model.norm.weight"


def test_zero_3_is_refused(llama: Path) -> None:
    """While DeepSpeed's config is set, transformers would partition the model, from tensors that are in memory."""
    from transformers.integrations import HfDeepSpeedConfig

    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    with pytest.raises(Unsupported, match="ZeRO 3 can only partition full tensors"):
        load(llama)
    del config
    assert load(llama)


def test_what_transformers_says_of_the_tensors_comes_along(llama: Path) -> None:
    model, found = load(llama, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


@pytest.mark.parametrize("kind", nightly_but(["mixtral"], ["llama", "mixtral"]))
def test_a_damaged_shard_is_named(produce: Produce, tmp_path: Path, kind: str) -> None:
    made = produce(sharded_models)
    shutil.copytree(made.root / kind / SHARDS, tmp_path / SHARDS)
    name = "model.layers.1.mlp.experts.gate_up_proj" if kind == "mixtral" else "model.layers.1.mlp.up_proj.weight"
    shard = tmp_path / SHARDS / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    last = made.truth[f"{kind}:{name}"].flatten()[-8:].numpy().tobytes()
    content[content.index(last)] ^= 1
    shard.write_bytes(content)
    with pytest.raises(Corrupt, match="CRC-32") as raised:
        load(tmp_path)
    assert raised.value.path == shard
    assert ".layers.1." in str(raised.value.tensor)
