"""The known trainers: the names that each uses on disk, with their sources.

A trainer is one entry of `TRAINERS`. ckptkit's own checkpoints have their own module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptkit.entry_points import PluginTable
from ckptkit.trainers.ckptkit import CKPTKIT
from ckptkit.trainers.trainer import ConfigOf, Mark, MetricsFile, TrainerFacts, Unread

# accelerate/utils/{constants,fsdp_utils}.py, `save_fsdp_model` and `save_fsdp_optimizer`: what models and optimizers
# are called, and the tag that `save_state` gives to an engine's checkpoint. A Trainer leaves its state beside them.
_FSDP = r"(?:pytorch_model_fsdp|optimizer)_[0-9]+|pytorch_model_fsdp(?:_[0-9]+)?\.bin"
_FSDP_BY_RANK = r"pytorch_model_fsdp(?:_[0-9]+)?_rank[0-9]+\.bin"
_ENGINE = r"pytorch_model(?:_[0-9]+)?"
_ENGINE_BY_RANK = r"(?:zero_pp_rank_[0-9]+_)?mp_rank_[0-9]+_model_states\.pt"
_FURTHER_MODEL = r"model_(?P<number>[0-9]+)\.safetensors"
_TRAINER_STATE = "trainer_state.json"
_BY_TRAINER = "Accelerate, by transformers' Trainer"

ACCELERATE = TrainerFacts(
    name="accelerate",
    marks=(
        Mark(_BY_TRAINER, files=(_FSDP_BY_RANK, r"trainer_state\.json")),
        Mark("Accelerate", files=(_FSDP_BY_RANK,)),
        Mark(_BY_TRAINER, place=_ENGINE, files=(_ENGINE_BY_RANK,), beside=_TRAINER_STATE),
        Mark("Accelerate", place=_ENGINE, files=(_ENGINE_BY_RANK,)),
        Mark(_BY_TRAINER, place=_FSDP, beside=_TRAINER_STATE),
        Mark("Accelerate", place=_FSDP),
    ),
    others=("optimizer_[0-9]+",),
    # of `save_state` without shards, accelerate/checkpointing.py: of several models each has a file, and so on
    beside={
        r"optimizer\.bin": "optimizer",
        r"optimizer_(?P<number>[0-9]+)\.bin": "optimizer_{number}",
        _FURTHER_MODEL: "model_{number}",
    },
    beside_of={_FURTHER_MODEL: "model.safetensors"},
    ranks=(r"(?:pytorch_model_fsdp|optimizer)(?:_[0-9]+)?_rank([0-9]+)\.bin",),
    own_state=(r"random_states_([0-9]+)\.pkl",),
    optional_state=(r"random_states_([0-9]+)\.pkl",),  # accelerate/checkpointing.py: "Could not load random states"
    states=(r"(?:scheduler|sampler|dl_state_dict)(?:_[0-9]+)?\.bin", r"scaler\.pt", r"custom_checkpoint_[0-9]+\.pkl"),
)

# transformers/trainer.py, `_save`: the pickled arguments of a Trainer, also beside the states of DeepSpeed and beside
# FSDP's full state dict. With shards of FSDP the Trainer leaves them out.
_ARGUMENTS = "training_args.bin"
_GLOBAL_STEP = "global_step([0-9]{1,18})"


def _marks_of_trainer(library: str, package: str) -> tuple[Mark, ...]:
    """Return the marks of a library with a Trainer of its own: the class of the arguments is in its package."""
    title, pickled = f"{library}, by transformers' Trainer", (_ARGUMENTS, rf"{package}\..*")
    return (
        Mark(title, files=(re.escape(_ARGUMENTS),), pickled=pickled),
        Mark(title, place=f"{_FSDP}|{_GLOBAL_STEP}", beside=_TRAINER_STATE, pickled=pickled),
    )


# trl/trainer/base_config.py of TRL 1.16; sentence_transformers/base/{training_args,model}.py of 6.2
TRL = TrainerFacts(name="trl", marks=_marks_of_trainer("TRL", "trl"))
SENTENCE_TRANSFORMERS = TrainerFacts(
    name="sentence_transformers",
    marks=(
        *_marks_of_trainer("sentence-transformers", "sentence_transformers"),
        Mark("sentence-transformers", json=("config_sentence_transformers.json", "__version__")),
    ),
)

# axolotl/core/{trainers/base,training_args}.py of axolotl 0.21: it counts tokens in a file, unless told otherwise.
_TOKENS = "tokens_state.json"
AXOLOTL = TrainerFacts(
    name="axolotl",
    marks=(
        *_marks_of_trainer("axolotl", "axolotl"),
        Mark("axolotl, by transformers' Trainer", place=_FSDP, json=(f"../{_TOKENS}", "trainable")),
        Mark("axolotl, by transformers' Trainer", json=(_TOKENS, "trainable")),
    ),
    states=(re.escape(_TOKENS),),
)

# lightning/fabric/strategies/{fsdp,model_parallel}.py, lightning/pytorch/callbacks/model_checkpoint.py: a DCP directory
# with `meta.pt`, or one file, named by values: `epoch=1-step=500.ckpt`, and `epoch=1-step=500-v1.ckpt` if that exists.
LIGHTNING = TrainerFacts(
    name="lightning",
    marks=(Mark("Lightning", files=(r"meta\.pt",)), Mark("Lightning", keys=("pytorch-lightning_version",))),
    steps=(r"(?!\.)(?:.*-)?step=([0-9]{1,18})(?:-v[0-9]+)?(?:\.ckpt)?",),
    beside={r"meta\.pt": ""},
    epochs=(r"epoch=([0-9]{1,18})(?:-v[0-9]+)?(?:\.ckpt)?",),
    versions=(r".*-v([0-9]{1,9})(?:\.ckpt)?",),
    last=(r"last(?:-v[0-9]+)?\.ckpt",),  # `save_last`: a copy, unless that is "link"
    best_keys=(("", ("callbacks", "*", "best_model_path")),),
)

# `model_checkpoint.py` of NeMo's callbacks: `model--loss=2.5-step=5-consumed_samples=40.0`, with `weights` and
# `context` in it. What is in `weights` is as Megatron's core saves, which NeMo trains with.
NEMO = TrainerFacts(
    name="nemo",
    marks=(Mark("NeMo", place="weights", beside="context"),),
    steps=(r"(?!\.)(?:.*-)?step=([0-9]{1,18})(?:[-.].*)?",),
)

# swift/trainers/mixin.py, swift/megatron/trainers/base.py of ms-swift 4.6.0: the directories of transformers' Trainer
# with the arguments beside the weights, with FSDP's shards only in the directory of the run; with Megatron,
# `checkpoint-500/iter_0000500`, and the Hub's weights beside it.
SWIFT = TrainerFacts(
    name="ms_swift",
    marks=(
        Mark(
            "ms-swift, by Megatron", place="iter_[0-9]+", json=("metadata.json", "sharded_backend"), beside="args.json"
        ),
        Mark("ms-swift", json=("args.json", "swift_version")),
        Mark("ms-swift", place=_FSDP, json=("../../args.json", "swift_version")),
    ),
    states=(r"args\.json", r"additional_config\.json"),
    # of swift/tuners/base.py, `SwiftModel.save_pretrained`
    unread={
        r"adapter_model\.(?:safetensors|bin)": Unread(
            "weights of one of ms-swift's own tuners, such as LLaMA-Pro",
            "load them with ms-swift and save the whole model",
            ("adapter_config.json", "swift_type"),
        )
    },
)

# megatron/training/checkpointing.py, megatron/core/dist_checkpointing: `iter_0000500` with metadata.json, which says
# how the shards are stored, and DCP in it, or a directory `mp_rank_TT_PPP` for each rank of tensors and pipeline. What
# all ranks have in common is `common.pt`, since core 0.20 an entry of the shards, and its tokenizer is in `tokenizer`.
# `fsdp_dtensor` and `torch_dcp` are DCP alone, without metadata.json: only the keys tell.
_BUCKET = r"(?:chained_[0-9]+\.)?optimizer\.distributed\..*bucket_idx_.*"
_OPAQUE = "the optimizer does not name the parameters of its states: the states are copied unchanged"

MEGATRON = TrainerFacts(
    name="megatron",
    marks=(
        Mark("Megatron-Bridge", files=(r"run_config\.yaml|train_state\.pt",)),
        Mark("Megatron", files=("mp_rank_[0-9]{2}(?:_[0-9]{3})*",)),
        Mark("Megatron", json=("metadata.json", "sharded_backend")),
        Mark("Megatron", keys=("args", "checkpoint_version")),
    ),
    steps=("iter_([0-9]{1,18})",),
    trackers=("latest_checkpointed_iteration.txt",),
    unread={
        r"\.zarray": Unread(
            "arrays of zarr, as Megatron saved before `torch_dist`",
            "load and save it with a Megatron-LM that has both, such as core 0.12",
        )
    },
    opaque={_BUCKET: _OPAQUE, r"rank_state\.[0-9]+\.(?:distrib_optim|optimizer)\..*": _OPAQUE},
    companions=("tokenizer", "hf"),
    # modelopt/torch/opt/plugins/mcore_dist_checkpointing.py: DCP of its own, for quantizers and pruned modules
    kept={"modelopt_state": ".metadata"},
    changes=("modelopt_state",),
    states=(r"train_state\.pt", r"metadata\.json", r"(?:modelopt_)?run_config\.yaml"),
    # of Megatron-Bridge, which with `also_save_hf_checkpoint` puts a model into `hf`, too
    own_state=(r"train_dataloader_dprank([0-9]{3,9})\.pt", r"layer_wise_optimizer_([0-9]{1,9})\.pt"),
    beside={r"common\.pt": ""},
    step_keys=(("", ("iteration",)), ("", ("common_state/shard_0_1", 0, "iteration"))),
    own_keys=(("rank_state", r"\[([0-9]+)\]"),),  # as the legacy format is read
)

# composer/utils/checkpoint.py: directories `ep0-ba5`, files `ep0-ba5-rank0.pt`, all under `state`, and the generators
# of ranks under `rng`. composer/checkpoint/save.py: `model` and `optim` in directories of their own.
COMPOSER = TrainerFacts(
    name="composer",
    marks=(
        Mark("Composer", files=(r"composer_metadata\.json",)),
        Mark("Composer", beside="composer_metadata.json"),
        Mark("Composer", keys=("rng", "state/model")),
    ),
    trackers=("latest-rank0.symlink", "latest-rank0.pt.symlink"),  # text: the object's name in a store
    steps=(r"ep[0-9]+-ba([0-9]{1,18})(?:-rank[0-9]+)?",),
)  # no `own_keys`: it counts the ranks in `rng` itself, and refuses a checkpoint without it

# torchtitan/components/checkpoint.py: DCP directories `step-N`, model names at the top level beside `optimizer.`,
# `lr_scheduler`, `dataloader` and `train_state`.
TORCHTITAN = TrainerFacts(
    name="torchtitan",
    marks=(Mark("torchtitan", keys=("train_state",)),),
    steps=("step-([0-9]{1,18})",),
    own_keys=(("dataloader", r"dp_rank_(\d+).*"),),
)

# torchtune/training/checkpointing/_checkpointer.py: `epoch_N`, and recipe states with `epochs_run`.
TORCHTUNE = TrainerFacts(
    name="torchtune", marks=(Mark("torchtune", keys=("epochs_run",)),), epochs=("epoch_([0-9]{1,18})",)
)

# olmo_core/train/checkpoint.py: `stepN` with DCP in `model_and_optim`, the state of each rank in `train`, and
# `.metadata.json`, without which it is no checkpoint.
OLMO = TrainerFacts(
    name="olmo",
    marks=(Mark("OLMo-core", place="model_and_optim"),),
    steps=("step([0-9]{1,18})",),
    # a rank without its own file uses the file of rank 0
    kept={"train": "model_and_optim", ".metadata.json": "model_and_optim"},
    states=(r"data_paths\.txt",),  # olmo_core/train/callbacks/config_saver.py, which also writes its own config.json
)

# nemo_automodel/components/checkpoint/{checkpointing,lifecycle,utils}.py of NeMo Automodel 0.7.0: `epoch_E_step_S` with
# `model`, which has safetensors of ranks or DCP, `optim`, DCP under `optim` and `sched`, and files of each rank, which
# the rank cannot do without. `.incomplete` is in it until all is written. `LATEST` leads to the last complete one.
AUTOMODEL = TrainerFacts(
    name="nemo_automodel",
    marks=(Mark("NeMo Automodel", place="model", beside="losses.json"),),
    trackers=("LATEST.txt",),
    best_trackers=("LOWEST_VAL.txt",),
    others=("optim",),
    companions=(".hf_metadata", "consolidated"),
    kept={"dataloader": "optim", "rng": "optim"},
    states=(r"step_scheduler\.pt", r"losses\.json", r"consolidate\.sh"),
    unfinished=(".incomplete",),
)

# v1/core/utils/checkpoint.py and v1/plugins/trainer_plugins/distributed/fsdp2.py of LLaMA-Factory 0.9.5, with `USE_V1`:
# `checkpoint-N` with `model` and `optimizer`, in DCP or as one process saves them, states of ranks in two directories,
# and a marker, which is written last: without it, `save_total_limit` deletes the checkpoint.
_COMPLETE = "CHECKPOINT_COMPLETE"

LLAMA_FACTORY = TrainerFacts(
    name="llama_factory",
    marks=(Mark("LLaMA-Factory", place="model", beside=_COMPLETE),),
    kept={"dataloader": _COMPLETE, "rng_state": _COMPLETE},
    states=(_COMPLETE,),
)

# verl/utils/checkpoint/fsdp_checkpoint_manager.py: `global_step_N/{actor,critic}` with a file of torch.save for each
# rank, config and tokenizer in `huggingface`, and an adapter's config in `lora_adapter`. verl/workers/fsdp_workers.py
# and verl/workers/engine/fsdp/transformer_impl.py give the optimizer `module.parameters()`, as SkyRL's strategy does.
VERL = TrainerFacts(
    name="verl",
    marks=(Mark("verl", files=(r"model_world_size_[0-9]+_rank_[0-9]+\.pt",)),),
    steps=("global_step_([0-9]{1,18})",),
    trackers=("latest_checkpointed_iteration.txt",),
    companions=("huggingface", "lora_adapter"),
    own_keys=((".*", r"rank_(\d+)"),),  # random states and others: `rng.rank_3`
    ranks=(r"(?:model|optim|extra_state)_world_size_[0-9]+_rank_([0-9]+)\.pt",),
    states=(r"data\.pt",),
)

# skyrl/backends/skyrl_train/distributed/{fsdp,megatron}_strategy.py and skyrl/train/*trainer.py of SkyRL a956457
# (August 2026): `global_step_N/{policy,critic}` with verl's files or Megatron's `torch_dist`, the adapters of
# Megatron's ranks in files of their own, and the states of loader and trainer beside these directories.
SKYRL = TrainerFacts(
    name="skyrl",
    marks=(
        Mark("SkyRL", files=(r"model_world_size_[0-9]+_rank_[0-9]+\.pt",), json=("fsdp_config.json", "fsdp_strategy")),
        Mark("SkyRL", files=(r"model_world_size_[0-9]+_rank_[0-9]+\.pt",), keys=("fsdp_strategy",)),
    ),
    trackers=("latest_ckpt_global_step.txt",),
    states=(r"(?:trainer|fully_async)_state\.pt",),
    unread={
        r"adapter_tp[0-9]+_pp[0-9]+.*\.pt": Unread(
            "adapters of Megatron's ranks, which do not say how the ranks share a tensor",
            "export the adapter with SkyRL; if one rank had the whole model, pass its file",
        )
    },
)

# prime_rl/{trainer,orchestrator}/ckpt.py and transports/weights/filesystem.py of prime-rl 559b447 (August 2026):
# `checkpoints/step_N/trainer`, DCP under `app`, with `dataloader/rank_R.pt` in it and `orchestrator/progress.pt` beside
# it. `broadcasts/step_N` has the weights for the engines, and `STABLE` once all ranks have written theirs.
PRIME_RL = TrainerFacts(
    name="prime_rl",
    marks=(
        Mark("prime-rl", keys=("app/model", "app/optimizers", "app/progress")),
        Mark("prime-rl, a broadcast", place="step_[0-9]+", files=("STABLE",)),
    ),
    complete_folders=("trainer",),
    states=(r"rank_[0-9]+\.pt", r"progress\.pt"),
    markers={"broadcasts/step_[0-9]+": "STABLE"},
)

# veomni/checkpoint/dcp_checkpointer.py of VeOmni 0.1.12: `global_step_N` with DCP of `model` and `optimizer`, and in a
# directory the state of each rank, with the step and the scheduler: a rank cannot resume without its own file.
VEOMNI = TrainerFacts(
    name="veomni",
    marks=(Mark("VeOmni", files=("extra_state",), keys=("model", "optimizer")),),
    kept={"extra_state": ".metadata"},
)

# slime/backends/megatron_utils of slime 624b824 and miles/backends of miles 31f1ca9 (August 2026): Megatron's `iter_N`
# with the place in the data in `rollout` beside them; of FSDP in miles, `iter_N` with DCP in each of three directories,
# and random state and counts beside these.
SLIME = TrainerFacts(
    name="slime",
    marks=(
        Mark(
            "slime or miles, by Megatron",
            place="iter_[0-9]+",
            json=("metadata.json", "sharded_backend"),
            beside="rollout",
        ),
        Mark("miles", place="model", keys=("model_state/model",)),
    ),
    others=("lr_scheduler",),
    states=(r"rng\.pt", r"meta\.json", r"global_dataset_state_dict_[0-9]+\.pt"),
    own_state=(r"(?:adapter_megatron|training_state)_rank([0-9]+)\.pt",),
)

# deepspeed/runtime/engine.py: `global_stepN` with the states of models and optimizers by rank, and `latest`, a file
# with the name of the directory that is meant. transformers' Trainer puts both into its own `checkpoint-N`.
_ZERO = r"(?:(?:bf16_|fp16_)?zero_pp_rank_[0-9]+_)?mp_rank_[0-9]{2,}_(?:model|optim)_states\.pt|latest_universal"

DEEPSPEED = TrainerFacts(
    name="deepspeed",
    marks=(
        Mark("DeepSpeed, by transformers' Trainer", files=(_ZERO,), beside=_TRAINER_STATE),
        Mark("DeepSpeed", files=(_ZERO,)),
    ),
    steps=(_GLOBAL_STEP, f"{_GLOBAL_STEP}_universal"),
    complete_folders=(_GLOBAL_STEP,),
    trackers=("latest",),
    states=(r"zero_to_(?:fp32|torch)\.py",),  # scripts that DeepSpeed copies there
    ranks=(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_[0-9]{2}_(?:model|optim)_states\.pt",),
)

# openrlhf/utils/deepspeed/deepspeed.py, `save_ckpt`, and openrlhf/trainer/ppo_trainer.py of OpenRLHF 0.11.2:
# DeepSpeed checkpoints. metric.json tells OpenRLHF which to delete; the best one of a run is `best_global_stepN`.
OPENRLHF = TrainerFacts(
    name="openrlhf",
    marks=(Mark("OpenRLHF, by DeepSpeed", files=(_ZERO,), json=("metric.json", "metric_key")),),
    states=(r"metric\.json",),
)

# dlrover/python/common/constants.py, `CheckpointConstant.TRACER_FILE_NAME`, of its flash checkpoints.
DLROVER = TrainerFacts(name="dlrover", trackers=("dlrover_latest.txt",))

# ray/train/v2/_internal/execution/{storage,checkpoint/checkpoint_manager}.py of Ray 2.56: directories that are called
# by their date, with whatever the loop reported, and beside them a file that says which of them Ray goes on from.
_SNAPSHOT = "checkpoint_manager_snapshot.json"

RAY_TRAIN = TrainerFacts(
    name="ray_train",
    marks=(Mark("a script of Ray Train", place="checkpoint_.*", beside=_SNAPSHOT),),
    json_trackers={_SNAPSHOT: ("latest_checkpoint_result", "checkpoint_dir_name")},
)

# nanotron/serialize/main.py: directories that are called by their step alone, and `latest.txt` with that step.
NANOTRON = TrainerFacts(name="nanotron", trackers=("latest.txt",))

# meta-llama/llama-models: `consolidated.NN.pth` for each rank, `params.json` and `tokenizer.model` beside them.
_CONSOLIDATED = r"consolidated\.([0-9]{2})\.pth"

META_LLAMA = TrainerFacts(
    name="meta_llama", marks=(Mark("Meta, or in its format", files=(_CONSOLIDATED,)),), ranks=(_CONSOLIDATED,)
)

# nanoGPT/train.py: `ckpt.pt`, with model, optimizer and the counts of its training; only the last one is kept.
NANOGPT = TrainerFacts(
    name="nanogpt",
    marks=(Mark("nanoGPT", keys=("model", "model_args", "iter_num", "best_val_loss")),),
    step_keys=(("", ("iter_num",)),),
)

# nanochat/checkpoint_manager.py, `save_checkpoint`: files of one directory, told by the step in their names:
# `model_000500.pt`, a bare state dict; `meta_000500.json`; and of each rank `optim_000500_rank0.pt`, of which the
# states are a rank's own slices.
NANOCHAT = TrainerFacts(
    name="nanochat",
    marks=(Mark("nanochat", place=r"model_(\d{6})\.pt", beside=r"meta_\1.json"),),
    steps=(r"model_([0-9]{6,18})",),
    beside={r"optim_(?P<step>[0-9]{6,18})_rank(?P<rank>[0-9]{1,9})\.pt": "optimizer_of_rank.{rank}"},
    ranks=(r"optim_[0-9]{6,18}_rank([0-9]{1,9})\.pt",),
    own_keys=(("optimizer_of_rank", "([0-9]+)"),),
)

# google/orbax, which JAX programs save with: `_CHECKPOINT_METADATA` with the items in directories, in each `_METADATA`.
ORBAX = TrainerFacts(
    name="orbax",
    marks=(Mark("orbax", files=("_CHECKPOINT_METADATA|_METADATA",)),),
    commits=(r"_CHECKPOINT_METADATA|commit_success\.txt|orbax\.checkpoint",),
)

# google/grain, checkpoint/handler.py of 0.2.18: beside what orbax saves, `iter/process_R-of-N.json` with the place of
# each process in the data.
GRAIN = TrainerFacts(name="grain", own_state=(r"process_([0-9]+)-of-[0-9]+\.json",))

# vllm/model_executor/model_loader/sharded_state_loader.py: `model-rank-R-part-P.safetensors` has what a rank of the
# engine holds, under its own names of fused tensors, after they were processed. Nothing says how ranks share them.
VLLM = TrainerFacts(
    name="vllm",
    unread={
        r"model-rank-[0-9]+-part-[0-9]+\.safetensors": Unread(
            "this is a sharded_state of vLLM or SGLang, which does not say how its ranks share a tensor",
            "take the model that it was made of",
        )
    },
)

# NVIDIA/TensorRT-LLM, models/modeling_utils.py, `PretrainedModel.save_checkpoint`: `rank0.safetensors` has what a rank
# holds, under names of its own. config.json has the `mapping` of the ranks.
TENSORRT_LLM = TrainerFacts(
    name="tensorrt_llm",
    unread={
        r"rank[0-9]+\.safetensors": Unread(
            "weights of TensorRT-LLM, as its ranks hold them",
            "take the model that they were made of",
            ("config.json", "mapping"),
        )
    },
)

# Scripts that call torch directly, and their usual names. Safetensors come from torch if ranks wrote their shards.
TORCH = TrainerFacts(
    name="torch",
    marks=(
        Mark("torch.distributed.checkpoint", format="dcp"),
        Mark("torch.save", format="pt"),
        Mark("torch.distributed.checkpoint, as safetensors", format="hf", by_ranks=True),
    ),
    states=(
        r"(?:optim(?:izer)?|scheduler|lr_scheduler|scaler|rng_state|sampler)[._].*|optim(?:izer)?(?:_state)?s?",
        r"extra(?:_state)?(?:_[0-9]+)?\.(?:pt|pth|bin)",
    ),
    steps=(r"(?:ep(?:och)?[-_]?[0-9]+[-_])?(?:ckpt|checkpoint|step|global_step|iter|ba)[-_]?([0-9]{1,18})(?:_ckp)?",),
    epochs=(r"epoch(?:[-_]?|=)([0-9]{1,18})(?:\.ckpt)?",),
    step_keys=(("", ("step",)), ("", ("global_step",))),
    trackers=("latest", "latest.txt", "LATEST"),
    best_trackers=("LOWEST_VAL",),
    last=(r"(?:(?:checkpoint|ckpt|model)[-_.]?)?(?:last|latest)\.(?:pt|pth|ckpt|pth\.tar)",),
)

# peft/utils/constants.py: adapters, by their config. A trainer leaves one beside the states of all ranks, in which its
# parameters have other names.
PEFT = TrainerFacts(
    name="peft",
    marks=(Mark("PEFT", files=(r"adapter_config\.json",)),),
    exported=(r"adapter_model\.safetensors",),
    descriptions=(r"adapter_config\.json", r"README\.md"),
)

# diffusers/configuration_utils.py: models, by the version in their config. diffusers/pipelines/pipeline_utils.py: a
# pipeline has a directory for each of its components, such as `unet` and `vae`, which model_index.json names.
DIFFUSERS = TrainerFacts(
    name="diffusers",
    marks=(Mark("Diffusers", json=("config.json", "_diffusers_version")),),
    unread={
        r"model_index\.json": Unread(
            "a diffusers pipeline, which has a directory for each model",
            "pass the directory of one model, such as unet, transformer, vae or text_encoder",
        )
    },
    config=ConfigOf("diffusers", ("_class_name",), stem="diffusion_pytorch_model"),
)

# timm/models/_hub.py, `save_config_for_hf`
TIMM = TrainerFacts(
    name="timm_models",
    marks=(Mark("timm", json=("config.json", "pretrained_cfg")),),
    config=ConfigOf("timm", ("architecture", "pretrained_cfg")),
)

# state-spaces/mamba, mamba_ssm/utils/hf.py: it loads `pytorch_model.bin` alone
MAMBA_SSM = TrainerFacts(
    name="mamba_ssm", config=ConfigOf("mamba_ssm", ("d_model", "n_layer"), needs="pytorch_model.bin")
)

# huggingface/lerobot, configs/policies.py; common/utils/train_utils.py: `005000/pretrained_model` and, in files of
# states, `training_state_keys`; `last` is a link to the latest
LEROBOT = TrainerFacts(
    name="lerobot",
    marks=(Mark("LeRobot", files=(r"train_config\.json",), json=("config.json", "type")),),
    states=(r"training_step\.json", r"train_config\.json"),
    # processor/pipeline.py: what normalizes observations and actions, and the statistics that it needs
    config=ConfigOf(
        "LeRobot", ("type",), beside=(r"policy_(?:pre|post)processor(?:_step_[0-9]+_\w+)?\.(?:json|safetensors)",)
    ),
)


def metrics_at_step(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that a Trainer logged at the step of its state, without its speed."""
    entries = [entry for entry in state["log_history"] if entry.get("step") == state["global_step"]]
    numbers = {
        str(name): float(value)
        for entry in entries
        for name, value in entry.items()
        if name == "loss" or (name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")))
    }
    return {**numbers, "step": float(state["global_step"])} if numbers else {}


# transformers/trainer.py, trainer_callback.py (`TrainerState`), modeling_utils.py (`save_pretrained`)
TRANSFORMERS = TrainerFacts(
    name="transformers",
    marks=(
        Mark("transformers' Trainer", files=(r"trainer_state\.json",)),
        Mark("transformers", json=("config.json", "transformers_version")),
    ),
    steps=("checkpoint-([0-9]{1,18})",),
    beside={r"optimizer\.pt": "optimizer"},
    step_keys=((_TRAINER_STATE, ("global_step",)),),
    best_keys=((_TRAINER_STATE, ("best_model_checkpoint",)),),
    own_state=(r"rng_state_([0-9]+)\.pth",),
    optional_state=(r"rng_state_([0-9]+)\.pth",),  # `Trainer._load_rng_state` continues without it
    states=(r"trainer_state\.json|training_args\.bin|scheduler\.pt|rng_state\.pth",),
    metrics={_TRAINER_STATE: MetricsFile(1 << 26, metrics_at_step)},  # it has an entry for every logging step
)

# `who_wrote` tries the trainers in this order: the most specific marks come first, and torch comes before the libraries
# whose files may be beside its checkpoints.
_ALL = (
    *(
        CKPTKIT,
        AXOLOTL,
        TRL,
        SENTENCE_TRANSFORMERS,
        SWIFT,
        ACCELERATE,
        LIGHTNING,
        NEMO,
        SLIME,
        MEGATRON,
        COMPOSER,
        TORCHTITAN,
    ),
    *(TORCHTUNE, OLMO, SKYRL, VERL, PRIME_RL, AUTOMODEL, VEOMNI, LLAMA_FACTORY, OPENRLHF, DEEPSPEED, DLROVER),
    *(NANOTRON, META_LLAMA, NANOGPT, NANOCHAT, ORBAX, GRAIN, VLLM, TENSORRT_LLM, RAY_TRAIN, LEROBOT, TORCH, PEFT),
    *(TRANSFORMERS, DIFFUSERS, TIMM, MAMBA_SSM),
)
TRAINERS = PluginTable("ckptkit.trainers", TrainerFacts, {trainer.name: trainer for trainer in _ALL})
