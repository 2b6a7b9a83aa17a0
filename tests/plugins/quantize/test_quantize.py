"""Models quantized to 8 bits, judged by transformers, compressed-tensors, torch, and brute force."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit import average, consolidate, convert, diff, finalize, inspect, merge, stats
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checks.parameter_changes import Moved
from ckptkit.errors import CkptError, Corrupt, Unsupported, Usage
from ckptkit.layout import Spec
from ckptkit.layout.dtypes import DTYPES
from ckptkit.plugins.quantize.quantize import ALONE, ASKED, HEADS, RAGGED, SCHEMES, choose_weights, module_names_of
from ckptkit.plugins.quantize.quantized_blocks import next_powers_of_two
from tests.formats.contract import assert_same
from tests.state.quantized.quantized_models import E4M3, deepseek

transformers = pytest.importorskip("transformers", reason="transformers is the judge")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the libraries' own
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]

SIZES = {"vocab_size": 130, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
HEADS_OF = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(params=["small blocks", "blocks"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine's blocks be a few rows, or as they are."""
    if request.param == "small blocks":
        for module in ("engine.blocks", "engine.visit", "plugins.quantize.quantized_blocks"):
            monkeypatch.setattr(f"ckptkit.{module}.BLOCK_BYTES", 6000)
        monkeypatch.setattr("ckptkit.plugins.quantize.quantized_blocks._PART", 1000)


def llama(root: Path, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """A model of known type, with a scale for each kind of block: zeros, tiny numbers, large ones."""
    torch.manual_seed(0)
    live = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **HEADS_OF, **more})).to(dtype)
    with torch.no_grad():
        live.model.layers[0].mlp.up_proj.weight[:128] = 0
        live.model.layers[0].mlp.up_proj.weight[128:256] *= 1e-30
        live.model.layers[1].mlp.down_proj.weight *= 1e4
    live.save_pretrained(root)
    return live


def model(root: Path) -> dict[str, Tensor]:
    return {name: tensor for file in root.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config(root: Path) -> Any:
    return json.loads((root / "config.json").read_text())


def by_transformers(tensors: dict[str, Tensor], **said: str) -> dict[str, Tensor]:
    """What transformers' own step makes of each projection."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    step = Fp8Quantize(SimpleNamespace(quantization_config=transformers.FineGrainedFP8Config(**said)))
    made = {name: step.convert({name: tensor}) for name, tensor in tensors.items() if name.endswith("_proj.weight")}
    return tensors | {name: tensor for parts in made.values() for name, tensor in parts.items()}


def by_compressed_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What compressed-tensors makes of each projection: scales in its dtype, the division in float32."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            scale, zero = calculate_qparams(tensor.amin(1, keepdim=True), tensor.amax(1, keepdim=True), args)
            made[name] = quantize(tensor.float(), scale.float(), zero.float(), args, dtype=E4M3)
            made[f"{name}_scale"] = scale
    return made


JUDGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "fp8-block": by_transformers,
    "fp8-channel": by_compressed_tensors,
    "fp8-block-ue8m0": partial(by_transformers, scale_fmt="ue8m0"),
}


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_and_scales_are_those_of_the_libraries(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    if (scheme, dtype) == ("fp8-channel", torch.float16):
        pytest.skip("compressed-tensors has scales in float16, which are 0 where ours in float32 are not")
    live = llama(tmp_path / "plain", dtype)
    consolidate(tmp_path / "plain", tmp_path / "in", names="keep")  # with checksums
    done = consolidate(tmp_path / "in", tmp_path / "out", quantize=scheme)
    assert_same(model(tmp_path / "out"), JUDGES[scheme](dict(live.state_dict())))
    assert done.unchecked_bytes == 0
    assert any("quantized 14 weights, " in note for note in done.notes)
    assert config(tmp_path / "out")["dtype"] == str(dtype).removeprefix("torch.")
    found = inspect(tmp_path / "out").quantized
    assert found is not None
    assert (found.weights, found.refusal) == (14, None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_loads_it_as_it_comes_back(tmp_path: Path, scheme: str) -> None:
    live = llama(tmp_path / "in", tie_word_embeddings=True)
    consolidate(tmp_path / "in", tmp_path / "out", quantize=scheme)
    said = config(tmp_path / "out")["quantization_config"]
    assert said.get("ignore", said.get("modules_to_not_convert")) == ["lm_head", "model.embed_tokens"]
    more = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, **(more if scheme == "fp8-channel" else {})
    )
    consolidate(tmp_path / "out", tmp_path / "back", dtype="bf16")
    theirs = {name: tensor for name, tensor in loaded.state_dict().items() if name != "lm_head.weight"}
    assert_same(model(tmp_path / "back"), theirs)
    assert "quantization_config" not in config(tmp_path / "back")
    for name, tensor in theirs.items():
        truth = live.state_dict()[name]
        torch.testing.assert_close(tensor, truth, rtol=2**-4, atol=truth.abs().max().item() / 200)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_are_found_and_routers_left(tmp_path: Path, scheme: str) -> None:
    torch.manual_seed(1)
    sizes = {**SIZES, **HEADS_OF, "num_experts": 3, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
    live = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).bfloat16()
    live.save_pretrained(tmp_path / "in")
    done = consolidate(tmp_path / "in", tmp_path / "out", quantize=scheme, strict=True)
    assert_same(model(tmp_path / "out"), JUDGES[scheme](model(tmp_path / "in")))
    assert any("did not quantize 1 weight of linear layers" in note and "lm_head" in note for note in done.notes)
    said = config(tmp_path / "out")["quantization_config"]
    left = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert said.get("ignore", said.get("modules_to_not_convert")) == left
    dequantize = (
        {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
        if scheme == "fp8-channel"
        else {}
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, **dequantize)
    consolidate(tmp_path / "out", tmp_path / "back", dtype="bf16")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    assert_same(dict(loaded.state_dict()), dict(plain.state_dict()))


def test_what_transformers_would_quantize_is_what_is_quantized(tmp_path: Path) -> None:
    """Its own classes replaced on the meta device hold exactly the names that are written."""
    from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

    live = llama(tmp_path / "in", hidden_size=384, num_key_value_heads=3, num_attention_heads=6)
    done = consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-block")
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(live.config)
    said = transformers.FineGrainedFP8Config(**config(tmp_path / "out")["quantization_config"])
    replace_with_fp8_linear(empty, said.modules_to_not_convert, said, pre_quantized=True)
    theirs = {f"{name}.weight" for name, module in empty.named_modules() if isinstance(module, FP8Linear)}
    ours = {name for name, tensor in model(tmp_path / "out").items() if tensor.dtype == E4M3}
    assert ours == theirs == {name for name in live.state_dict() if "mlp" in name or "o_proj" in name}
    assert any(RAGGED in note and "k_proj" in note for note in done.notes)  # 192 rows
    assert any(ALONE in note and "q_proj" in note for note in done.notes)
    assert {name: tensor.shape for name, tensor in empty.state_dict().items()} == {
        name: tensor.shape for name, tensor in model(tmp_path / "out").items()
    }


@pytest.mark.parametrize(
    ("kind", "more", "left"),
    [
        ("GPTNeoX", {}, ["embed_out", "gpt_neox.embed_in", "lm_head"]),
        ("Mixtral", {"num_local_experts": 2}, [f"model.layers.0.{one}.experts" for one in ("block_sparse_moe", "mlp")]),
    ],
)
def test_what_is_left_has_the_names_of_files_and_of_memory(
    tmp_path: Path, kind: str, more: dict[str, Any], left: list[str]
) -> None:
    """By those of the files asks vLLM; transformers by its own, and would take a head for one with scales."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    sizes = {"vocab_size": 130, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    config_of = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=1, **more)
    live = getattr(transformers, f"{kind}ForCausalLM")(config_of)
    live.save_pretrained(tmp_path / "in")
    globs = ["*.experts.*"] if kind == "Mixtral" else []
    consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-block", exclude_quantize=globs)
    said = transformers.FineGrainedFP8Config(**config(tmp_path / "out")["quantization_config"])
    assert set(left) <= set(said.modules_to_not_convert)
    with torch.device("meta"):
        empty = type(live)(live.config)
    replace_with_fp8_linear(empty, said.modules_to_not_convert, said, pre_quantized=True)
    theirs = sum("scale_inv" in name for name in empty.state_dict())
    assert theirs == sum("scale_inv" in name for name in model(tmp_path / "out")) > 0


def test_globs_leave_a_module_and_what_is_joined_with_it(tmp_path: Path) -> None:
    llama(tmp_path / "in")
    globs = ["*.1.mlp.up_proj", "model.layers.0.self_attn.o_proj.weight"]
    done = consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-channel", exclude_quantize=globs)
    left = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    assert config(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens", *left]
    assert {name for name, tensor in model(tmp_path / "out").items() if tensor.dtype == E4M3}.isdisjoint(
        f"{name}.weight" for name in left
    )
    assert sum(ASKED in note for note in done.notes) == sum(ALONE in note for note in done.notes) == 1
    with pytest.raises(Usage, match=r"'\*\.q' matches no weight"):
        consolidate(tmp_path / "in", tmp_path / "none", quantize="fp8-block", exclude_quantize="*.q")
    consolidate(tmp_path / "in", tmp_path / "any", quantize="fp8-channel", exclude_quantize="*.q", allow_unmatched=True)


def test_experts_are_left_together() -> None:
    specs = {f"layers.0.experts.{i}.{m}.weight": Spec(DTYPES["bfloat16"], (128, 128)) for i in (0, 1) for m in "ab"}
    specs["layers.0.visual.a.weight"] = Spec(DTYPES["bfloat16"], (128, 128))
    found = choose_weights(specs, specs, (), SCHEMES["fp8-block"], {"layers.0.experts.1.b.weight"})
    assert found.names == ()
    assert {reason: len(names) for reason, names in found.unquantized_names_by_reason.items()} == {
        HEADS: 1,
        ASKED: 1,
        ALONE: 3,
    }
    assert module_names_of(specs) == ["layers.0.experts", "layers.0.visual.a"]
    assert r"re:layers\.0\.experts\..*" in SCHEMES["fp8-channel"].quantization_config(module_names_of(specs))["ignore"]


def test_scales_become_the_powers_that_transformers_makes_of_them() -> None:
    """Its logarithms are those of float32: a scale a little above a power of 2 may become that power."""
    scales = torch.cat(
        [torch.rand(4000) * 10.0**size for size in range(-36, 37, 4)] + [torch.exp2(torch.arange(-126.0, 119))]
    )
    scales = torch.cat(
        [scales, torch.nextafter(scales, torch.tensor(torch.inf)), scales * (1 + 2**-19), scales * (1 - 2**-20)]
    )
    theirs = torch.pow(2.0, torch.ceil(torch.log2(scales.clamp(min=torch.finfo(torch.float32).tiny))))
    assert torch.equal(torch.from_numpy(next_powers_of_two(scales.numpy())), theirs)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_number_that_is_none_is_an_error_by_name(tmp_path: Path, scheme: str, number: float) -> None:
    live = llama(tmp_path / "live")
    live.model.layers[1].mlp.up_proj.weight.data[200, 3] = number
    live.save_pretrained(tmp_path / "in")
    with pytest.raises(Corrupt, match="cannot choose a scale") as caught:
        consolidate(tmp_path / "in", tmp_path / "out", quantize=scheme)
    assert caught.value.tensor == "model.layers.1.mlp.up_proj.weight"
    assert not (tmp_path / "out").exists()
    consolidate(tmp_path / "in", tmp_path / "out", quantize=scheme, exclude_quantize="*.1.mlp.*")


def test_a_dtype_is_that_of_the_rest(tmp_path: Path) -> None:
    live = llama(tmp_path / "in", torch.float32)
    done = consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-channel", dtype="bf16")
    found, truth = model(tmp_path / "out"), live.state_dict()
    scale = found["model.layers.0.mlp.down_proj.weight_scale"]
    assert scale.dtype == found["lm_head.weight"].dtype == torch.bfloat16
    weight = truth["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(scale, (weight.abs().amax(1, keepdim=True) / 448).bfloat16())
    numbers = (weight / scale.float()).clamp(-448, 448).to(E4M3)
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"].float(), numbers.float())
    assert done.cast["model.layers.0.mlp.down_proj.weight"] == "float32 => float8_e4m3fn times scales"


def test_parts_make_what_one_call_makes(tmp_path: Path) -> None:
    llama(tmp_path / "plain")
    consolidate(tmp_path / "plain", tmp_path / "in", names="keep")
    consolidate(tmp_path / "in", tmp_path / "one", quantize="fp8-block")
    for part in ("2/3", "1/3", "3/3"):
        consolidate(tmp_path / "in", tmp_path / "parts", quantize="fp8-block", part=part)
    done = finalize(tmp_path / "parts")
    assert_same(model(tmp_path / "parts"), model(tmp_path / "one"))
    assert done.unchecked_bytes == 0


def test_a_damaged_weight_is_found(tmp_path: Path) -> None:
    llama(tmp_path / "plain")
    consolidate(tmp_path / "plain", tmp_path / "in", names="keep")
    (chunk,) = open_layout(tmp_path / "in").tensors["model.layers.1.mlp.up_proj.weight"].chunks
    data = bytearray((tmp_path / "in" / chunk.path).read_bytes())
    data[chunk.offset + 5] ^= 1
    (tmp_path / "in" / chunk.path).write_bytes(data)
    with pytest.raises(Corrupt, match="CRC-32"):
        consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-block")


def test_what_cannot_be_quantized_is_an_error(tmp_path: Path) -> None:
    quantized, _ = deepseek(tmp_path / "quantized")
    with pytest.raises(Unsupported, match="quantized already"):
        consolidate(quantized, tmp_path / "out", quantize="fp8-block", dtype="bf16")
    llama(tmp_path / "in", hidden_size=96)
    with pytest.raises(Unsupported, match="not multiples of 128") as caught:
        consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-block")
    assert "fp8-channel" in str(caught.value.hint)
    cases: dict[str, dict[str, Any]] = {
        "expected fp8-block, .*, found `int4`": {"quantize": "int4"},
        "exclude_quantize does nothing": {"exclude_quantize": "*"},
        "the Hub's names": {"quantize": "fp8-block", "names": "keep"},
    }
    for words, options in cases.items():
        with pytest.raises(Usage, match=words):
            consolidate(tmp_path / "in", tmp_path / "out", **options)
    with pytest.raises(Usage, match="cannot store quantized weights"):
        convert(tmp_path / "in", tmp_path / "out", to="dcp", quantize="fp8-block")
    with pytest.raises(Usage, match="an average"):
        average([tmp_path / "in"] * 2, tmp_path / "out", quantize="fp8-block")
    with pytest.raises(Usage, match="merge and quantize"):
        merge(tmp_path / "in", tmp_path / "in", tmp_path / "out", quantize="fp8-block")
    (tmp_path / "in" / "config.json").unlink()
    with pytest.raises(Usage, match=r"no config\.json"):
        consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-channel")
    (tmp_path / "in" / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(Unsupported, match="does not know which layers are linear"):
        consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-channel")


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stats_see_what_quantized_weights_stand_for(tmp_path: Path, scheme: str) -> None:
    live = llama(tmp_path / "plain")
    consolidate(tmp_path / "plain", tmp_path / "in", names="keep")
    consolidate(tmp_path / "in", tmp_path / "out", quantize=scheme)
    consolidate(tmp_path / "out", tmp_path / "wide", dtype="fp32")
    found, wide = stats(tmp_path / "in", tmp_path / "out"), model(tmp_path / "wide")
    assert isinstance(found, Moved)
    assert {one.name for one in found.tensors} == live.state_dict().keys()
    for one in found.tensors:
        truth = live.state_dict()[one.name].double()
        gap = truth - wide[one.name].double()
        assert one.distance.max_abs == gap.abs().max().item()
        assert one.change == pytest.approx((gap.norm() / truth.norm()).item(), rel=1e-9)
        assert one.distance.elements == truth.numel()
    assert any("by their values: 14 quantized weights of" in note for note in found.notes)
    again = stats(tmp_path / "out", tmp_path / "out")
    assert isinstance(again, Moved)
    assert again.whole.change == 0
    assert any("stats A B" in note for note in diff(tmp_path / "in", tmp_path / "out").notes)


def test_stats_find_damage_in_what_is_quantized(tmp_path: Path) -> None:
    llama(tmp_path / "in")
    consolidate(tmp_path / "in", tmp_path / "out", quantize="fp8-block")
    dropped = {
        name: tensor
        for name, tensor in model(tmp_path / "out").items()
        if not name.endswith("0.mlp.up_proj.weight_scale_inv")
    }
    save_file(dropped, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "ckptkit.json").unlink()
    with pytest.raises(CkptError, match="found none"):
        stats(tmp_path / "in", tmp_path / "out")
