"""Quantized weights made plain, judged by torch's own reader, transformers, compressed-tensors and brute force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from ckptkit import average, consolidate, convert, inspect
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsupported, Usage
from tests.state.quantized.quantized_models import E4M3, FP8, MXFP4, deepseek, gpt_oss, in_blocks, spread, written

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
Y = "y.weight"


@pytest.fixture(params=["small blocks", "blocks"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine's blocks be a few rows, or as they are."""
    if request.param == "small blocks":
        for module in ("blocks", "visit"):
            monkeypatch.setattr(f"ckptkit.engine.{module}.BLOCK_BYTES", 6000)


def model(root: Path) -> dict[str, Tensor]:
    return {name: tensor for file in root.glob("*.safetensors") for name, tensor in load_file(file).items()}


def with_sums(root: Path) -> Path:
    """The same model with a CRC-32 of each tensor."""
    consolidate(root, root.with_name("with sums"), names="keep")
    return root.with_name("with sums")


def config(root: Path) -> Any:
    return json.loads((root / "config.json").read_text())


def assert_same(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_what_brute_force_says(tmp_path: Path, dtype: str) -> None:
    root, truth = deepseek(tmp_path / "in")
    root = with_sums(root)
    done = consolidate(root, tmp_path / "out", dtype=dtype)
    assert_same(model(tmp_path / "out"), {name: tensor.to(DTYPES[dtype]) for name, tensor in truth.items()})
    assert done.unchecked_bytes == 0
    assert "quantization_config" not in config(tmp_path / "out")
    assert config(tmp_path / "out")["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    assert any("removed the quantization from config.json" in note for note in done.notes)
    assert done.cast["model.layers.1.small.weight"].startswith("float8_e4m3fn times scales => ")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that nothing is distributed
def test_blocks_are_what_torch_reads(tmp_path: Path) -> None:
    root, _ = deepseek(tmp_path / "in")
    consolidate(root, tmp_path / "out", dtype="bf16")
    ours = {name: tensor for name, tensor in model(tmp_path / "out").items() if name.endswith("weight")}
    theirs = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    reader = QuantizedHuggingFaceStorageReader(str(root), target_dtype=torch.bfloat16)
    dcp.load(theirs, storage_reader=reader, no_dist=True)
    assert_same(ours, theirs)


@pytest.mark.usefixtures("sizes")
def test_four_bits_are_what_transformers_makes(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is the judge")
    root, stored = gpt_oss(tmp_path / "in")
    root = with_sums(root)
    done = consolidate(root, tmp_path / "out", dtype="bf16")
    assert done.unchecked_bytes == 0
    truth = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in stored:
        own = name.removesuffix("_blocks")
        if own != name:
            truth[own] = mxfp4.convert_moe_packed_tensors(stored[name], stored[f"{own}_scales"])
    assert_same(model(tmp_path / "out"), truth)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's own
def test_transformers_loads_what_was_quantized(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    live = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads)).bfloat16()
    tensors = dict(live.state_dict())
    truth = dict(tensors)
    for name, shape in {"gate_up_proj": (3, 192, 2, 16), "down_proj": (3, 64, 3, 16)}.items():
        whole = f"model.layers.0.mlp.experts.{name}"
        blocks = tensors[f"{whole}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8)
        scales = tensors[f"{whole}_scales"] = torch.randint(110, 125, shape[:-1], dtype=torch.uint8)
        truth[whole] = convert_moe_packed_tensors(blocks, scales)
        del tensors[whole]
    root = written(tmp_path / "in", MXFP4, tensors)
    (root / "config.json").write_text(json.dumps(live.config.to_dict() | {"quantization_config": MXFP4}))
    consolidate(root, tmp_path / "out", dtype="bf16", strict=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(dict(loaded.state_dict()), truth)


def test_a_mixture_of_experts_is_what_config_calls_for(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge")
    torch.manual_seed(4)
    sizes = {"vocab_size": 40, "hidden_size": 144, "intermediate_size": 150, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 3, "moe_intermediate_size": 24}
    live = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads))
    live.save_pretrained(tmp_path / "live")
    truth = model(tmp_path / "live")
    tensors = dict(truth)
    for name, tensor in truth.items():
        if name.endswith("_proj.weight"):
            tensors[name], scales = in_blocks(tuple(tensor.shape))
            tensors[f"{name}_scale_inv"] = scales
            truth[name] = tensors[name].float() * spread(scales, tuple(tensor.shape), (128, 128))
    assert any(".experts.2.down_proj." in name for name in truth)
    root = written(tmp_path / "in", FP8, tensors)
    (root / "config.json").write_text(json.dumps(config(tmp_path / "live") | {"quantization_config": FP8}))
    consolidate(root, tmp_path / "out", dtype="fp32", strict=True)
    assert_same(model(tmp_path / "out"), truth)
    consolidate(root, tmp_path / "bytes")
    assert config(tmp_path / "bytes")["quantization_config"] == FP8


@pytest.mark.parametrize("of_scales", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_compressed_tensors_are_what_the_library_makes(tmp_path: Path, strategy: str, of_scales: torch.dtype) -> None:
    library = pytest.importorskip("compressed_tensors.quantization", reason="the library is the judge")
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    more = {"block_structure": [64, 32]} if strategy == "block" else {}
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    numbers, blocks = in_blocks((192, 96), (64, 32))
    scales = {"tensor": blocks[:1, 0], "channel": torch.rand(192, 1) + 0.1, "block": blocks}[strategy].to(of_scales)
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    tensors = {Y: numbers, "y.weight_scale": scales, "y.input_scale": torch.ones(1)}
    consolidate(written(tmp_path / "in", said, tensors), tmp_path / "out", dtype="bf16")
    truth = dequantize(numbers, scales, args=library.QuantizationArgs(**weights)).bfloat16()
    assert_same(model(tmp_path / "out"), {Y: truth})


def test_scales_that_are_exponents(tmp_path: Path) -> None:
    numbers, _ = in_blocks((130, 140))
    raw = torch.tensor([[120, 127], [130, 100]], dtype=torch.uint8)
    tensors = {Y: numbers, f"{Y}_scale_inv": raw.view(torch.float8_e8m0fnu)}
    consolidate(written(tmp_path / "in", FP8, tensors), tmp_path / "out", dtype="fp32")
    scales = torch.exp2(raw.float() - 127)
    assert_same(model(tmp_path / "out"), {Y: numbers.float() * spread(scales, (130, 140), (128, 128))})


def test_without_a_dtype_bytes_stay_what_they_are(tmp_path: Path) -> None:
    root, _ = deepseek(tmp_path / "in")
    consolidate(root, tmp_path / "out", names="keep")
    assert model(tmp_path / "out").keys() == model(root).keys()
    for name, tensor in model(root).items():
        assert torch.equal(model(tmp_path / "out")[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert config(tmp_path / "out")["quantization_config"] == FP8


def test_a_renamed_part_of_a_model(tmp_path: Path) -> None:
    root, truth = deepseek(tmp_path / "in")
    consolidate(root, tmp_path / "out", dtype="bf16", include=["*kv_a.weight", "*norm*"], rename=["^model\\.=>"])
    wanted = ("model.layers.0.kv_a.weight", "model.norm.weight")
    assert_same(model(tmp_path / "out"), {name[6:]: truth[name].bfloat16() for name in wanted})


def test_a_damaged_scale_is_found(tmp_path: Path) -> None:
    root, _ = deepseek(tmp_path / "in")
    root = with_sums(root)
    (chunk,) = open_layout(root).tensors["model.layers.1.experts.gate_up_proj_scale_inv"].chunks
    data = bytearray((root / chunk.path).read_bytes())
    data[chunk.offset + 5] ^= 1
    (root / chunk.path).write_bytes(data)
    with pytest.raises(Corrupt, match="CRC-32"):
        consolidate(root, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "asked",
    [
        {"exclude": "*_scale_inv"},
        {"exclude": "*kv_a.weight"},
        {"include": ["*.weight", "*norm*"]},
        {"rename": r"kv_a\.weight$=>kv_b.weight"},
    ],
)
def test_numbers_and_scales_go_together(tmp_path: Path, asked: dict[str, Any]) -> None:
    root, _ = deepseek(tmp_path / "in")
    with pytest.raises(Usage, match="scale_inv"):
        consolidate(root, tmp_path / "out", names="keep", **asked)
    consolidate(root, tmp_path / "both", exclude="*kv_a*", rename=r"ragged\.weight=>other.weight", names="keep")
    found = inspect(tmp_path / "both").quantized
    assert found is not None
    assert (found.weights, found.refusal) == (3, None)


def test_what_a_config_says_of_plain_weights_goes(tmp_path: Path) -> None:
    """A training that began with a quantized model has plain weights, and the config.json of that."""
    root = written(tmp_path / "in", MXFP4, {"a.weight": torch.ones(4, 4)})
    done = consolidate(root, tmp_path / "out")
    assert "quantization_config" not in config(tmp_path / "out")
    assert any("mxfp4" in note and "but they are plain" in note for note in done.notes)


def test_numbers_of_eight_bits_without_scales_stay_and_are_said(tmp_path: Path) -> None:
    root = written(tmp_path / "in", None, {"a.weight": torch.ones(4, 4).to(E4M3), "b.weight": torch.ones(4)})
    done = consolidate(root, tmp_path / "out", dtype="bf16")
    assert {name: tensor.dtype for name, tensor in model(tmp_path / "out").items()} == {
        "a.weight": E4M3,
        "b.weight": torch.bfloat16,
    }
    assert any("1 weight of 8 bits stayed as" in note and "a.weight" in note for note in done.notes)


@pytest.mark.parametrize("rule", ["*scale_inv=bf16", "*kv_a.weight=bf16"])
def test_nothing_is_torn_from_its_scales(tmp_path: Path, rule: str) -> None:
    root, _ = deepseek(tmp_path / "in")
    with pytest.raises(Usage, match=r"rounding would destroy them|matches only some quantized weights"):
        consolidate(root, tmp_path / "out", dtype=rule, names="keep")
    with pytest.raises(Usage, match="rounding would destroy them"):
        convert(root, tmp_path / "out", to="dcp", dtype="bf16")
    with pytest.raises(Unsupported, match="cannot average"):
        average([root, root], tmp_path / "out")


BAD: dict[str, tuple[dict[str, Tensor], dict[str, Any], type[CkptError], str]] = {
    "no scale": ({Y: torch.ones(4, 4).to(E4M3)}, FP8, Mismatch, "found none"),
    "no weight": ({"z.weight": torch.ones(2), "z.weight_scale_inv": torch.ones(1, 1)}, FP8, Mismatch, "is float32"),
    "another grid": ({f"{Y}_scale_inv": torch.ones(3, 2)}, FP8, Mismatch, r"200, 130.*found \[3, 2\]"),
    "one axis": ({f"{Y}_scale_inv": torch.ones(4)}, FP8, Mismatch, r"found \[4\] scales"),
    "integers": ({f"{Y}_scale_inv": torch.ones(2, 2, dtype=torch.int64)}, FP8, Mismatch, "found int64"),
    "NaN": ({f"{Y}_scale_inv": torch.tensor([[1, torch.nan], [1, 1]])}, FP8, Corrupt, "found nan"),
    "infinite": ({f"{Y}_scale_inv": torch.tensor([[1, 1], [1, torch.inf]])}, FP8, Corrupt, "found inf"),
    "negative": ({f"{Y}_scale_inv": torch.tensor([[1, 1], [-1, 1.0]])}, FP8, Corrupt, "found -1"),
    "huge": ({f"{Y}_scale_inv": torch.tensor([[1, 1], [3e38, 1]])}, FP8, Corrupt, r"found 3e\+38"),
    "zero": ({f"{Y}_scale_inv": torch.tensor([[1, 1], [0, 1.0]])}, FP8, Corrupt, "is 0, but the values"),
    "blocks of 0": ({}, FP8 | {"weight_block_size": [0, 128]}, Corrupt, r"\[0, 128\]"),
    "blocks of 2**40": ({}, FP8 | {"weight_block_size": [1 << 40, 1]}, Corrupt, "blocks of quantized"),
    "blocks of words": ({}, FP8 | {"weight_block_size": "128"}, Corrupt, "two sizes"),
    "another method": ({}, {"quant_method": "quark"}, Unsupported, "`quark`"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_clear_error(tmp_path: Path, case: str) -> None:
    more, said, error, words = BAD[case]
    numbers, scales = in_blocks((200, 130))
    if "no" in case.split():
        numbers, scales = in_blocks((4, 4))
    tensors = {"x.weight": numbers, "x.weight_scale_inv": scales}
    if case not in ("no scale", "no weight"):
        tensors |= {Y: numbers, f"{Y}_scale_inv": scales}
    root = written(tmp_path / "in", said, tensors | more)
    with pytest.raises(error, match=words):
        consolidate(root, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()
    if error is Mismatch or case.startswith(("blocks", "another")):
        found = inspect(root).quantized
        assert found is not None
        assert found.refusal is not None


def test_zeros_may_have_a_scale_of_zero(tmp_path: Path) -> None:
    tensors = {Y: torch.zeros(4, 4).to(E4M3), f"{Y}_scale_inv": torch.zeros(1, 1)}
    consolidate(written(tmp_path / "in", FP8, tensors), tmp_path / "out", dtype="bf16")
    assert not model(tmp_path / "out")[Y].any()


def test_four_bits_with_scales_that_are_none(tmp_path: Path) -> None:
    root, stored = gpt_oss(tmp_path / "in")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    stored[name][1, 2, 1] = 255
    root = written(tmp_path / "bad", None, stored)
    with pytest.raises(Corrupt, match="2\\*\\*128"):
        consolidate(root, tmp_path / "out", dtype="bf16")
    root = written(tmp_path / "worse", None, stored | {name: stored[name][:, :-1]})
    with pytest.raises(Mismatch, match="do not match scales"):
        consolidate(root, tmp_path / "out", dtype="bf16")


HALF = torch.ones(4, 8).half()
FOREIGN: dict[str, dict[str, Tensor]] = {
    "bitsandbytes in 4 bits": {
        "x.weight": torch.zeros(16, 1, dtype=torch.uint8),
        "x.weight.absmax": torch.ones(1),
        "x.weight.quant_map": torch.ones(16),
        "x.weight.quant_state.bitsandbytes__nf4": torch.zeros(30, dtype=torch.uint8),
    },
    "bitsandbytes in 4": {  # as FSDP wants it
        "x.weight": torch.ones(8, 1).bfloat16(),
        "x.weight.absmax": torch.ones(1),
        "x.weight.quant_state.bitsandbytes__fp4": torch.zeros(30, dtype=torch.uint8),
    },
    "bitsandbytes in 8 bits": {"x.weight": HALF.to(torch.int8), "x.SCB": torch.ones(4)},
    "GPTQ or AWQ": {"x.qweight": HALF.int(), "x.qzeros": HALF.int(), "x.scales": HALF},
    "torchao": {"x._weight_qdata": HALF.to(torch.int8), "x._weight_scale": HALF},
    "g_idx": {"x.weight_packed": HALF.int(), "x.weight_scale": HALF, "x.weight_g_idx": torch.ones(64).int()},
    "sparse weights": {"x.compressed": HALF, "x.bitmask": HALF.to(torch.uint8), "x.shape": torch.ones(2).int()},
    "ModelOpt with AWQ": {"x.weight": HALF.to(torch.uint8), "x.weight_scale": HALF, "x.pre_quant_scale": HALF[0]},
    "zero points": {"x.weight": HALF.to(E4M3), "x.weight_scale": HALF, "x.weight_zero_point": HALF.to(E4M3)},
}


@pytest.mark.parametrize("method", FOREIGN)
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    root = written(tmp_path / "in", None, FOREIGN[method] | {"norm.weight": torch.ones(3)})
    found = inspect(root).quantized
    assert found is not None
    assert found.refusal is not None
    assert method in found.refusal
    for to in ("hf", "pt"):
        with pytest.raises(Unsupported, match=method):
            convert(root, tmp_path / "out", to=to, dtype="bf16")
    consolidate(root, tmp_path / "out", dtype="norm*=bf16")
    assert model(tmp_path / "out")["norm.weight"].dtype == torch.bfloat16


def test_plain_weights_stay_castable_whatever_config_says(tmp_path: Path) -> None:
    tensors = {"x.weight": torch.ones(4, 4), "rng": torch.zeros(9, dtype=torch.uint8)}
    root = written(tmp_path / "in", {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors)
    assert inspect(root).quantized is None
    consolidate(root, tmp_path / "out", dtype="bf16")
    assert model(tmp_path / "out")["x.weight"].dtype == torch.bfloat16


def test_inspect_says_what_is_quantized(tmp_path: Path) -> None:
    root, truth = deepseek(tmp_path / "deepseek")
    found = inspect(root)
    assert found.quantized is not None
    assert (found.quantized.method, found.quantized.weights, found.quantized.refusal) == ("fp8", 4, None)
    assert found.parameters == sum(tensor.numel() for tensor in truth.values())
    root, _ = gpt_oss(tmp_path / "oss")
    found = inspect(root)
    assert found.quantized is not None
    assert (found.quantized.method, found.quantized.sizes) == ("mxfp4", ((1, 32),))
    assert found.quantized.parameters == 3 * (48 * 160 + 33 * 64)
    plain = written(tmp_path / "plain", FP8, {"x.weight": torch.ones(2, 2)})
    assert inspect(plain).quantized is None


def test_other_names_are_refused(tmp_path: Path) -> None:
    numbers, scales = in_blocks((4, 4))
    layer = "model.layers.0.self_attn.q_proj.weight"
    root = written(tmp_path / "in", FP8, {layer: numbers, f"{layer}_scale_inv": scales})
    for dtype in ((), "bf16"):
        with pytest.raises(Unsupported, match="separate them from their scales"):
            consolidate(root, tmp_path / "out", names="torchtitan", dtype=dtype)


def test_a_config_that_does_not_declare_the_quantization_is_not_written_with_it(tmp_path: Path) -> None:
    """Loaders would take the stored numbers for the weights: transformers computes something else without a word."""
    weight = torch.ones(4, 8).to(E4M3)
    root = written(tmp_path / "in", None, {"x.weight": weight, "x.weight_scale": torch.ones(4, 1)})
    (root / "config.json").write_text('{"model_type": "none"}')
    with pytest.raises(Mismatch, match="does not say that the weights are quantized") as refused:
        consolidate(root, tmp_path / "out")
    assert "--dtype bf16" in str(refused.value.hint)
    assert not (tmp_path / "out").exists()
    consolidate(root, tmp_path / "plain", dtype="bf16")
    foreign = written(tmp_path / "foreign", None, FOREIGN["bitsandbytes in 8 bits"])
    (foreign / "config.json").write_text('{"model_type": "none"}')
    assert "does not say" in consolidate(foreign, tmp_path / "out").warnings[-1]
