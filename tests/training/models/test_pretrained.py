"""Models of transformers in the loop, judged by transformers itself."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ckptkit.errors import IOFailure, NotACheckpoint, Unsupported, Usage
from ckptkit.training.config import TrainConfig
from ckptkit.training.initial import initialize_model
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.models.blueprint import Blueprint, choose_blueprint, download_if_hub_id
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import LlamaBlueprint
from ckptkit.training.shard import build_sharded_model
from tests.tiers import nightly_but
from tests.training.data.hugging_face import save_tokenizer
from tests.training.models.test_llama import draw_tokens, pack

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = pytest.mark.slow

TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, **TOKEN_IDS,
}  # fmt: skip
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
MOE = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED | {"tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", GROUPED),
    "gemma2": ("Gemma2Config", GROUPED | {"sliding_window": 8}),
    "gemma3_text": ("Gemma3TextConfig", GROUPED | {"sliding_window": 8, "sliding_window_pattern": 2}),
    "gpt2": ("GPT2Config", TOKEN_IDS | {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 8, "n_head": 4}),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": 8}),
    "phi3": ("Phi3Config", GROUPED),
    "olmo2": ("Olmo2Config", GROUPED),
    "mixtral": ("MixtralConfig", MOE),
    "gpt_oss": ("GptOssConfig", MOE | {"sliding_window": 8}),
    "gpt_neox": ("GPTNeoXConfig", SHAPE),
    "opt": ("OPTConfig", {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("FalconConfig", SHAPE),
}
TOKENS = draw_tokens(4, 24)
POSITIONS = pack((10, 1, 13), (24,), (3, 21), (12, 12))


def save_config(root: Path, name: str, **more: Any) -> Path:
    kind, shape = SMALL[name]
    getattr(transformers, kind)(**shape, **more).save_pretrained(root)
    return root


def make_blueprint(root: Path, name: str, **more: Any) -> Blueprint:
    return choose_blueprint(str(save_config(root, name, **more)))


def materialize(blueprint: Blueprint) -> nn.Module:
    """The model as the loop makes it, on one device: on `meta` first, and then of garbage."""
    with torch.device("meta"):
        model = blueprint.build()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(77)
    blueprint.tie_weights(model)
    initialize_model(blueprint, model, 0)
    return model


def build_normally(root: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(root)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def require_same_logits(blueprint: Blueprint, model: nn.Module, theirs: Any) -> None:
    """Bit for bit those of transformers; and of packed documents, those of each alone, however the others are."""
    model.eval()
    theirs.eval()
    with torch.no_grad():
        assert torch.equal(blueprint.compute_logits(model, TOKENS, None), theirs(TOKENS).logits)
        packed = blueprint.compute_logits(model, TOKENS, POSITIONS)
        for tokens, positions, logits in zip(TOKENS, POSITIONS, packed, strict=True):
            starts = (positions == 0).nonzero().flatten().tolist()
            for document, found in zip(tokens.tensor_split(starts[1:]), logits.tensor_split(starts[1:]), strict=True):
                torch.testing.assert_close(found, theirs(document[None]).logits[0], rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", nightly_but(["llama", "gpt2", "gemma3_text", "mixtral"], SMALL))
def test_every_family_is_as_transformers_makes_it(tmp_path: Path, name: str) -> None:
    blueprint = make_blueprint(tmp_path, name)
    model = materialize(blueprint)
    assert model.training
    theirs = build_normally(tmp_path)
    assert ties(model) == ties(theirs)
    buffers = dict(model.named_buffers())
    assert buffers.keys() == {key for key, _ in theirs.named_buffers()}
    for key, buffer in theirs.named_buffers():
        assert torch.equal(buffers[key], buffer), key
    started = model.state_dict()
    for key, tensor in theirs.state_dict().items():
        if tensor.numel() >= 32:
            assert float(started[key].std()) == pytest.approx(float(tensor.std()), rel=0.4), key
    theirs.load_state_dict(model.state_dict())
    require_same_logits(blueprint, model, theirs)
    layers = theirs.config.num_hidden_layers
    assert (blueprint.vocab_size, blueprint.max_length, blueprint.layers) == (256, 64, layers)
    assert blueprint.attention_width == 32
    assert [type(block) for block in blueprint.transformer_blocks(model)] == [
        type(block) for block in blueprint.transformer_blocks(theirs)
    ]
    assert len(blueprint.transformer_blocks(model)) == layers


def ties(model: nn.Module) -> list[set[str]]:
    """The names that each parameter has, of those with several."""
    names: dict[Tensor, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    return sorted((found for found in names.values() if len(found) > 1), key=sorted)


def test_a_rule_of_the_parent_counts(tmp_path: Path) -> None:
    """GPT-2 lets attention and MLP shrink their last projection by the depth; on its own it would not be."""
    weights = materialize(make_blueprint(tmp_path, "gpt2")).state_dict()
    assert 0.9 * 0.02 < float(weights["transformer.h.3.mlp.c_fc.weight"].std()) < 1.1 * 0.02
    assert 0.9 * 0.005 < float(weights["transformer.h.3.mlp.c_proj.weight"].std()) < 1.1 * 0.005


def test_a_model_of_text_and_images_has_its_text_trained(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    transformers.Gemma3Config(text_config=SMALL["gemma3_text"][1], vision_config=vision).save_pretrained(tmp_path)
    blueprint = choose_blueprint(str(tmp_path))
    model = materialize(blueprint)
    theirs = build_normally(tmp_path)
    theirs.load_state_dict(model.state_dict())
    require_same_logits(blueprint, model, theirs)
    assert "Gemma3DecoderLayer" in {type(block).__name__ for block in blueprint.transformer_blocks(model)}


def test_dropout_is_the_configs(tmp_path: Path) -> None:
    blueprint = make_blueprint(tmp_path, "gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.5)
    model = materialize(blueprint)
    assert not torch.equal(blueprint.compute_logits(model, TOKENS, None), blueprint.compute_logits(model, TOKENS, None))


LINEAR_ATTENTION = GROUPED | {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        (
            "BloomConfig",
            {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256},
            "does not accept `position_ids`",
        ),
        (
            "MambaConfig",
            {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256},
            "does not accept `position_ids`",
        ),
        ("Lfm2Config", GROUPED | {"layer_types": ["conv", "full_attention"]}, "see each other"),
        ("Qwen3NextConfig", LINEAR_ATTENTION, "see each other"),
    ],
)
def test_a_family_that_mixes_packed_documents_is_refused(
    tmp_path: Path, kind: str, shape: dict[str, Any], reason: str
) -> None:
    getattr(transformers, kind)(**shape).save_pretrained(tmp_path)
    blueprint = choose_blueprint(str(tmp_path))
    model = materialize(blueprint)
    assert blueprint.compute_logits(model, TOKENS, None).shape == (4, 24, blueprint.vocab_size)
    for _ in range(2):
        with pytest.raises(Unsupported, match=reason):
            blueprint.compute_logits(model, TOKENS, POSITIONS)


def test_masks_are_looked_at_only_where_documents_meet(tmp_path: Path) -> None:
    transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]).save_pretrained(tmp_path)
    blueprint = choose_blueprint(str(tmp_path))
    model = materialize(blueprint).eval()
    alone = pack((24,), (24,), (24,), (24,))
    with torch.no_grad():
        assert torch.equal(
            blueprint.compute_logits(model, TOKENS, alone), blueprint.compute_logits(model, TOKENS, None)
        )


def test_what_no_rule_initializes_must_have_weights(tmp_path: Path) -> None:
    """Apertus makes the parameters of its activation as it is built, and has no rule for them."""
    transformers.ApertusConfig(**GROUPED).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="does not know how to initialize") as caught:
        materialize(choose_blueprint(str(tmp_path)))
    assert caught.value.tensor == "model.layers.0.mlp.act_fn.alpha_p"
    build_normally(tmp_path).save_pretrained(tmp_path)
    materialize(choose_blueprint(str(tmp_path)))


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    transformers.CTRLConfig(vocab_size=256, n_embd=32, dff=48, n_layer=2, n_head=4).save_pretrained(tmp_path)
    blueprint = choose_blueprint(str(tmp_path))
    with pytest.raises(Unsupported, match="does not name the transformer blocks of a `ctrl`"):
        blueprint.transformer_blocks(blueprint.build())


RUN = TrainConfig(run=Path("unused"), device="cpu", seed=5)
SHARDINGS = {
    "FSDP2": RUN,
    "FSDP2 recompute": TrainConfig(run=Path("unused"), device="cpu", seed=5, recompute_every=1),
    "FSDP1": TrainConfig(run=Path("unused"), device="cpu", seed=5, fsdp="1"),
}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def loss_of(blueprint: Blueprint, model: nn.Module, rows: slice) -> Tensor:
    logits = blueprint.compute_logits(model, TOKENS[rows], POSITIONS[rows])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[rows, 1:].flatten())


def learn(roots: dict[str, Path], place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu") as mesh:
        for name, root in roots.items():
            for way, config in SHARDINGS.items():
                blueprint = choose_blueprint(str(root))
                sharded = build_sharded_model(config, blueprint, mesh, config.seed)
                loss = loss_of(blueprint, sharded.model, slice(2 * place.rank, 2 * place.rank + 2))
                loss.backward()
                report((name, way, float(loss.detach()), float(sharded.sharding.clip_gradients(sharded.model, 1.0))))


def test_sharded_models_start_and_learn_as_whole_ones(tmp_path: Path) -> None:
    roots = {name: tmp_path / name for name in ("gpt2", "gemma3_text", "mixtral")}
    for name, root in roots.items():
        save_config(root, name, **(NO_DROPOUT if name == "gpt2" else {}))
    heard: list[Any] = []
    launch(partial(learn, roots), 2, heard.append)
    assert len(heard) == 2 * len(roots) * len(SHARDINGS)
    for name, root in roots.items():
        blueprint = choose_blueprint(str(root))
        model = materialize(blueprint)
        initialize_model(blueprint, model, RUN.seed)
        losses = [loss_of(blueprint, model, rows) for rows in (slice(2), slice(2, 4))]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        for way in SHARDINGS:
            found = [entry[2:] for entry in heard if entry[:2] == (name, way)]
            assert sorted(loss for loss, _ in found) == pytest.approx(
                sorted(float(loss.detach()) for loss in losses), rel=1e-6
            ), (name, way)
            assert [norm for _, norm in found] == pytest.approx([norm, norm], rel=1e-5), (name, way)


def test_a_size_and_a_config_of_a_llama_are_built_in(tmp_path: Path) -> None:
    size = choose_blueprint("3m", tied=False, vocab_size=300)
    assert isinstance(size, LlamaBlueprint)
    assert size.config == ModelConfig.of_size("3m", tied=False, vocab_size=300)
    path = save_config(tmp_path, "llama") / "config.json"
    llama = choose_blueprint(str(path))
    assert isinstance(llama, LlamaBlueprint)
    assert llama.config.hidden_size == 32


def test_a_config_that_is_no_llama_says_to_give_its_directory(tmp_path: Path) -> None:
    path = save_config(tmp_path, "mixtral") / "config.json"
    with pytest.raises(Unsupported, match="mixtral") as caught:
        choose_blueprint(str(path))
    assert caught.value.hint is not None
    assert str(tmp_path) in caught.value.hint


@pytest.mark.parametrize("model", ["huge", "./absent", "absent/config.json", "a/b/c"])
def test_a_model_that_is_none_is_refused(model: str) -> None:
    for choose in (choose_blueprint, download_if_hub_id):
        with pytest.raises(Usage, match=f"unknown model `{model}`"):
            choose(model)


def test_weights_are_taken_where_there_are_some(tmp_path: Path) -> None:
    blueprint = make_blueprint(tmp_path, "llama")
    assert blueprint.weights is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Unsupported, match="pickled") as caught:
        choose_blueprint(str(tmp_path))
    assert caught.value.path == tmp_path / "pytorch_model.bin"
    save_file(build_normally(tmp_path).state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    assert choose_blueprint(str(tmp_path)).weights == tmp_path


def test_files_are_those_that_a_checkpoint_needs(tmp_path: Path) -> None:
    save_tokenizer(save_config(tmp_path, "gpt2"))
    transformers.GenerationConfig(eos_token_id=2).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("no")
    files = choose_blueprint(str(tmp_path)).model_files()
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert files == {name: (tmp_path / name).read_bytes() for name in files}
    assert "README.md" not in files


def change(**keys: Any) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        path = save_config(root, "llama") / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return do


@pytest.mark.parametrize(
    ("prepare", "error", "reason"),
    [
        (lambda _: None, NotACheckpoint, "config.json"),
        (change(model_type="none_such"), Unsupported, "none_such"),
        (change(model_type="vit"), Unsupported, "cannot build"),
        (change(num_attention_heads="many"), Unsupported, "cannot build"),
        (change(quantization_config={"quant_method": "mxfp4"}), Unsupported, "quantized"),
        (change(num_attention_heads=5, head_dim=None), Unsupported, "cannot build"),
    ],
    ids=["no config", "unknown", "no language model", "ill-typed", "quantized", "contradiction"],
)  # fmt: skip
def test_a_directory_that_transformers_cannot_build_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None], error: type[Exception], reason: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(error, match=reason):
        choose_blueprint(str(tmp_path)).build()


def test_code_of_the_directory_is_not_run(tmp_path: Path) -> None:
    change(model_type="strange", auto_map={"AutoConfig": "strange.Config"})(tmp_path)
    (tmp_path / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(Unsupported):
        choose_blueprint(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_without_transformers_a_directory_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_config(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "ckptkit.training.models.pretrained", raising=False)
    with pytest.raises(Usage, match="transformers") as caught:
        choose_blueprint(str(tmp_path))
    assert "pip install" in str(caught.value.hint)


def cache_on_the_hub(hub: Path, model: str, source: Path) -> Path:
    """Put the files of `source` where the Hub's client keeps those of `model` once they are downloaded."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = hub / f"models--{model.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    for directory in (repository / "refs", snapshot, blobs):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in source.iterdir():
        (blobs / f"blob-of-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    return snapshot


def test_a_hub_id_is_resolved_to_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the Hub's own cache, as after a download; the Hub itself is out of a test's reach."""
    config = save_config(tmp_path / "shape", "qwen3")
    build_normally(config).save_pretrained(tmp_path / "whole")
    snapshot = cache_on_the_hub(tmp_path / "hub", "org/model", tmp_path / "whole")
    cache_on_the_hub(tmp_path / "hub", "org/shape", config)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    resolved = download_if_hub_id("org/model")
    assert resolved == str(snapshot)
    blueprint = choose_blueprint(resolved)
    assert blueprint.weights == snapshot
    assert "config.json" in blueprint.model_files()
    blueprint.build()
    with pytest.raises(Unsupported, match="org/shape"):
        download_if_hub_id("org/shape")
    with pytest.raises(IOFailure, match="org/other"):
        download_if_hub_id("org/other")
