"""Explain the error of a failed load by what the checkpoint contains.

`MESSAGES` has the texts of torch, transformers, Accelerate, DeepSpeed and safetensors; `…` stands for the variable
parts. A page of the documentation is generated from this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, partial

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.plugins.doctor import error_causes
from ckptkit.plugins.doctor.choose_fixes import choose_fixes, dry_run_fix
from ckptkit.plugins.doctor.damage import find_unreadable_torch_metadata
from ckptkit.plugins.doctor.doctor import open_load_target
from ckptkit.plugins.doctor.error_causes import Look, MatchedMessage, explain_shape_mismatch
from ckptkit.plugins.doctor.finding import Finding
from ckptkit.plugins.doctor.optimizer import list_missing_states

_ANY = "…"
_ONLY_ZEROS = (
    "Most often, the file contains only zeros: its blocks were never written because the disk was full or the power "
    "failed. Otherwise torch before 0.4 wrote the file."
)
_MAX_CHARACTERS = 1 << 20  # searched characters: logs of many ranks repeat the same text
# lines of source code in a traceback: they contain the templates of messages
_SOURCE = re.compile(r"^(\[rank\d+\]:\s?)?    .*$", re.MULTILINE)


@dataclass(frozen=True)
class Message:
    """A message of a library, and its meaning. `code` is the code of the finding if `look` finds no cause."""

    words: str
    whose: str
    code: str
    means: str
    look: Look | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return a pattern with a group for each variable part. A part at the end extends to the end of its line."""
        pieces = [r"\s+".join(map(re.escape, piece.split(" "))) for piece in self.words.split(_ANY)]
        return re.compile("(.+?)".join(pieces) if pieces[-1] else "(.+?)".join(pieces[:-1]) + "(.*)")


MESSAGES: tuple[Message, ...] = (
    Message(
        "Missing key in checkpoint state_dict: …",
        "torch, `dcp.load`",
        "missing",
        "The model or optimizer asks for a key that the checkpoint does not contain. Often there are more; torch "
        "reports only the first, inside a `CheckpointException`. If the key is `…state.NAME.step` or `.exp_avg`, the "
        "parameter never received a gradient, so torch saved no state: `ckptkit doctor CKPT` lists all of them. If "
        "the key is a weight, the names differ: by `_orig_mod.` (torch.compile), by `module.` (DDP), by a key such "
        "as `model`, or because the head is tied. `ckptkit doctor CKPT --model MODEL` says which, and how to fix it.",
        error_causes.explain_key_not_in_checkpoint,
    ),
    Message(
        "cannot pickle code objects",
        "torch before 2.12 under Python 3.13 or later, `dcp.load` and `dcp.save` on several ranks",
        "rank_error",
        "A rank failed, and torch could not send its error to the other ranks. The error itself is lost: load or save "
        "in one process, or with torch 2.12 or later, to see it.",
    ),
    Message(
        "Missing optimizer state for parameter '…' in checkpoint",
        "torch, `set_optimizer_state_dict`",
        "optimizer_state",
        "The parameter requires a gradient, but received none before the checkpoint was saved. Complete the "
        "optimizer with `--complete-optimizer`, or load with `StateDictOptions(strict=False)`.",
        lambda _, target: list_missing_states(target),
    ),
    Message(
        "Missing key(s) in state_dict: …",
        "torch, `load_state_dict`",
        "missing",
        "The state dict does not contain these parameters under the names that the model uses. If as many keys are "
        "unexpected as are missing, only a prefix or a wrapper differs. If the names look quite different, another "
        "trainer wrote them: see [Names](names.md).",
        error_causes.explain_missing_keys,
    ),
    Message(
        "Unexpected key(s) in state_dict: …",
        "torch, `load_state_dict`",
        "unexpected",
        "The state dict has tensors that the model does not have: from another wrapper or an adapter, a module's "
        "`_extra_state`, or a head that this model lacks.",
        error_causes.explain_unexpected_keys,
    ),
    Message(
        "'DeviceMesh' object has no attribute '_preserve_rank_order'",
        "torch 2.15, `load_state_dict`",
        "torch_version",
        "A rank's file contains DTensors that an older torch pickled (2.13 does this); their meshes lack an "
        "attribute that torch 2.15 compares. Run `ckptkit reshard CKPT OUT --to N` with the same number of ranks: "
        "it writes files that both versions load.",
    ),
    Message(
        "size mismatch for …: copying a param with shape … from checkpoint, the shape in current model is …",
        "torch and transformers",
        "shape",
        "The name is the same, the shape differs. If only the first number differs, for the embedding and the head,"
        " the vocabulary was padded: `--vocab-size` fixes it. Otherwise the config belongs to another model.",
        lambda matched, target: explain_shape_mismatch((*matched.parts[1:], matched.parts[0]), target),
    ),
    Message(
        "Size mismatch between saved … and current: … for …",
        "torch, `dcp.load`",
        "shape",
        "The name is the same, the shape differs: the vocabulary was padded, or the config belongs to another model. "
        "If the current size is a single large number, it is FSDP1's flat parameter: load inside "
        "`FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)`, or with `get_state_dict`.",
        lambda matched, target: explain_shape_mismatch(matched.parts, target),
    ),
    Message(
        "You set `ignore_mismatched_sizes` to `False`, thus raising an error",
        "transformers 5",
        "shape",
        "The table above the message lists the tensors whose shapes differ. `ckptkit doctor CKPT --model MODEL` "
        "says why. `ignore_mismatched_sizes=True` would fill them with random numbers.",
        error_causes.explain_mismatch_without_names,
    ),
    Message(
        "were not initialized from the model checkpoint at … and are newly initialized: …",
        "transformers 4",
        "missing",
        "transformers only prints a warning, but do not continue: these tensors are random now. The names in the file "
        "differ from the model's names: by a prefix, a wrapper, an adapter, or because they belong to another family.",
        error_causes.explain_mismatch_without_names,
    ),
    Message(
        "LOAD REPORT…from: …",
        "transformers 5, with a table of names",
        "missing",
        "transformers only prints a warning, but do not continue if the table lists `MISSING`: those tensors are "
        "random now. If as many are `UNEXPECTED`, the names in the file differ from the model's names: by a prefix, a "
        "wrapper, an adapter, or because they belong to another family. `MISMATCH` means another shape.",
        error_causes.explain_mismatch_without_names,
    ),
    Message(
        "loaded state dict has a different number of parameter groups",
        "torch, `Optimizer.load_state_dict`",
        "groups",
        "The optimizer was built with another number of groups than the saved one: for example with and without "
        "weight decay, or with one learning rate per layer. Build it with the saved groups; `ckptkit doctor CKPT "
        "--like OTHER` compares two checkpoints.",
        error_causes.list_group_sizes,
    ),
    Message(
        "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        "torch, `Optimizer.load_state_dict`",
        "groups",
        "A group lists another number of parameters: since the save, parameters were frozen or added, or an adapter "
        "was added. Parameter indices do not show which parameters changed. To keep the states of the other "
        "parameters, rewrite the optimizer by name: `ckptkit convert CKPT OUT --to dcp --optimizer-keys names`.",
        error_causes.list_group_sizes,
    ),
    Message(
        "The state of _OptimStateKey(… is empty. This should happen when use_orig_params=True.",
        "torch, FSDP1, when it saves",
        "optimizer_state",
        "A whole FSDP1 unit received no gradient: a vision tower without images, or experts without tokens. Wrap "
        "with `use_orig_params=True`, or freeze the modules that you do not train. torch "
        "saved nothing: resume from the checkpoint before this step.",
    ),
    Message(
        "is not in the optimizer state. The FSDPParamInfo has the param keys …",
        "torch, FSDP1, when it saves",
        "optimizer_state",
        "In one FSDP1 unit, some parameters received a gradient and others did not. Wrap the parameters that do not "
        "get a gradient in every step as FSDP1 units of their own. torch saved nothing: resume from the checkpoint "
        "before this step.",
    ),
    Message(
        "used a DP world size of … but the current world size is ….",
        "DeepSpeed",
        "world_size",
        "ZeRO's files can only be loaded by as many ranks as saved them. Any number of ranks loads a universal "
        'checkpoint with `"checkpoint": {"load_universal": true}`. To make one, run `ckptkit convert SRC OUT --to '
        "universal`.",
        error_causes.explain_rank_count,
    ),
    Message(
        "Unable to find latest file at …, if trying to load latest checkpoint",
        "DeepSpeed",
        "incomplete",
        "Pass the directory above the tag (`global_stepN`); it contains the file `latest`, which names the tag. If "
        "`latest` is missing there, the save did not finish, because DeepSpeed writes `latest` last. DeepSpeed only "
        "warns, and training starts from scratch.",
    ),
    Message(
        "Loading a checkpoint for MP=… but world size is …",
        "Meta's llama",
        "world_size",
        "`consolidated.*.pth` are the parts of tensor-parallel ranks, and the same number of processes must load "
        "them. `ckptkit consolidate` joins them into one model.",
        error_causes.explain_rank_count,
    ),
    Message(
        "No such file or directory: …",
        "Python, under `dcp.load`, verl and others",
        "incomplete",
        "If the file is `.metadata`, the save did not finish, or the file is only on the first node. If it is "
        "`__3_0` or similar, that rank's shard is on another node. If it is `model_world_size_8_rank_0.pt`, another "
        "number of ranks saved the checkpoint.",
        error_causes.explain_missing_file,
    ),
    Message(
        "metadata is None",
        "torch, `dcp.load`",
        "incomplete",
        "torch could not read a `.metadata`: the save did not finish, the directory is wrong, or, if the traceback "
        "also says `too many values to unpack`, a later torch wrote the metadata.",
        lambda _, target: find_unreadable_torch_metadata(target),
    ),
    Message(
        "too many values to unpack (expected 5",
        "torch before 2.15, `dcp.load`",
        "torch_version",
        "torch 2.15 or later wrote `.metadata`, and describes tensors by six properties. `ckptkit reshard` and "
        "`ckptkit convert --to dcp` write metadata that every torch reads.",
        lambda _, target: find_unreadable_torch_metadata(target),
    ),
    Message(
        "Invalid checkpoint metadata for …, expected BytesStorageMetadata but found …",
        "torch, `dcp.load`",
        "kind",
        "The checkpoint has a tensor where the state to load into has a number or another object: a learning rate "
        "that became a tensor, or a key at another level.",
        error_causes.explain_tensor_for_value,
    ),
    Message(
        "Weights only load failed",
        "torch 2.6 and later, `torch.load`",
        "pickle",
        "The file contains Python objects beside tensors: arguments, a numpy random state, or a loss scaler. "
        "`weights_only=False` runs any code in the file. ckptkit reads the tensors without running code: use "
        "`ckptkit consolidate` for the model, `ckptkit convert --to dcp` for everything.",
        error_causes.explain_missing_model,
    ),
    Message(
        "Unsupported operand …",
        "torch 2.6 and later, `torch.load`",
        "corrupt",
        "torch.save did not write this file: with `118` it is a git-lfs pointer (run `git lfs pull`), with `60` a "
        "web page.",
    ),
    Message("files saved in the legacy .tar format", "torch 2.6 and later, `torch.load`", "corrupt", _ONLY_ZEROS),
    Message("filename 'storages' not found", "torch, `torch.load(weights_only=False)`", "corrupt", _ONLY_ZEROS),
    Message(
        "EOFError: …",
        "Python, under `torch.load` and `dcp.load`",
        "corrupt",
        "If the message is `Ran out of input`, or empty, the file is empty. The save ended before it wrote "
        "anything, or the disk was full. Use another checkpoint.",
    ),
    Message(
        "Error no file named … found in directory …",
        "transformers, `from_pretrained`",
        "no_model",
        "The directory is a training checkpoint, such as FSDP's `pytorch_model_fsdp_0` or ZeRO shards, but "
        "`from_pretrained` expects safetensors: run `ckptkit consolidate CKPT OUT`. Several safetensors files need "
        "an index: `ckptkit doctor MODEL --fix OUT` writes one.",
        error_causes.explain_missing_model,
    ),
    Message(
        "Can't find a valid checkpoint at …",
        "transformers, `Trainer`",
        "no_model",
        "The Trainer looks for a model file or for FSDP's directories, and the job now uses another strategy than "
        "the one that saved: FSDP's shards need `--fsdp` again. `ckptkit inspect` shows what the checkpoint contains.",
        error_causes.explain_missing_model,
    ),
    Message(
        "Parameter '…' found in sharded model state dict but missing from full state dict",
        "Accelerate, FSDP2",
        "missing",
        "The model to load into is wrapped or compiled differently from the model in the file. `ckptkit doctor CKPT "
        "--model MODEL` shows the rule (`--rename`) that makes the names equal.",
        error_causes.explain_key_not_in_checkpoint,
    ),
    Message(
        "PytorchStreamReader failed …",
        "torch, `torch.load`",
        "corrupt",
        "The file is truncated, or torch.save did not write it: a save was killed, the disk was full, or a copy "
        "stopped early. `ckptkit verify` names the file. Use another checkpoint.",
    ),
    Message(
        "Error while deserializing header: …",
        "safetensors",
        "corrupt",
        "The file is truncated (`incomplete metadata`, formerly `MetadataIncompleteBuffer`), or it is not "
        "safetensors (`header too large`, `header too small`, `invalid header`): a download stopped early, git-lfs "
        "left a pointer, or a `model.safetensors` of empty FSDP shards is beside the real files. `ckptkit verify` "
        "names it. If the message says `unknown variant`, an entry has no dtype: `ckptkit doctor MODEL --fix OUT` "
        "drops it.",
    ),
    Message(
        "invalid load key, …",
        "Python's pickle, under `torch.load`",
        "corrupt",
        "torch.save did not write this file: with `'v'` it is a git-lfs pointer (run `git lfs pull`), with `'<'` a "
        "web page, and with `'\\x00'` a file that was never written.",
    ),
)


def explain(error: BaseException | str, ckpt: Source) -> tuple[Finding, ...]:
    """Return what the error of a failed load means, which part of the checkpoint it is about, and commands that fix it.

    ckptkit knows messages of torch, transformers and others. It searches `error` and its causes. Returns () for any
    other error. Raises a `CkptError` if there is no checkpoint at `ckpt`.
    """
    texts = [error] if isinstance(error, str) else []
    cause = None if isinstance(error, str) else error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        texts += [f"{type(cause).__name__}: {cause}", *getattr(cause, "__notes__", ())]
        cause = cause.__cause__ or cause.__context__
    text = _SOURCE.sub("", "\n".join(texts)[:_MAX_CHARACTERS])
    checkpoint = Checkpoint.open(ckpt)
    case, findings = open_load_target(checkpoint)
    meanings: list[Finding] = []
    for message in MESSAGES:
        for parts in dict.fromkeys(match.groups() for match in message.pattern.finditer(text)):
            findings += message.look(MatchedMessage(parts, text), case) if message.look and case else ()
            meanings.append(Finding(message.code, None, message.means))  # if the checkpoint shows no cause
    return choose_fixes(findings or meanings, checkpoint, partial(dry_run_fix, checkpoint=checkpoint))[0]
