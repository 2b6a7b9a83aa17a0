"""List the messages that failed loads end with: what each means, what to do, and what to look for in the checkpoint.

The words are those of torch, transformers, Accelerate, DeepSpeed and safetensors; `…` stands for what differs. A page
of the documentation is written from this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ckptkit.diagnosis import explanations
from ckptkit.diagnosis.explanations import Look

ANY = "…"


@dataclass(frozen=True)
class Message:
    """A message as a library says it, and what it means. `code` is that of the finding where nothing more is found."""

    words: str
    whose: str
    code: str
    means: str
    look: Look | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of the message, with a group for each part that differs; the last ends with its line."""
        pieces = [r"\s+".join(map(re.escape, piece.split(" "))) for piece in self.words.split(ANY)]
        return re.compile("(.+?)".join(pieces) if pieces[-1] else "(.+?)".join(pieces[:-1]) + "(.*)")


MESSAGES: tuple[Message, ...] = (
    Message(
        "Missing key in checkpoint state_dict: …",
        "torch, `dcp.load`",
        "missing",
        "The state that is loaded into has an entry that the checkpoint has not by this name; the first of perhaps "
        "many. Of `…state.NAME.step` or `.exp_avg` the parameter never had a gradient, and so no state was saved: "
        "`ckptkit doctor CKPT` lists all of them. Of a weight the names differ: by `_orig_mod.` of torch.compile, by "
        "`module.` of DDP, by a key such as `model`, or by a head that is tied.",
        explanations.find_key,
    ),
    Message(
        "Missing optimizer state for parameter '…' in checkpoint",
        "torch, `set_optimizer_state_dict`",
        "optimizer_state",
        "The parameter requires a gradient, and had none before the checkpoint was saved. Complete the optimizer, or "
        "load with `StateDictOptions(strict=False)`.",
        explanations.find_states,
    ),
    Message(
        "Missing key(s) in state_dict: …",
        "torch, `load_state_dict`",
        "missing",
        "The model has parameters that the state dict has not by these names. If as many are unexpected, a prefix or a "
        "wrapper is all that differs; if the names look quite different, they are of another trainer: see "
        "[Names](names.md).",
        explanations.find_keys,
    ),
    Message(
        "Unexpected key(s) in state_dict: …",
        "torch, `load_state_dict`",
        "unexpected",
        "The state dict has tensors that the model does not call for: those of another wrapper, an adapter's, a "
        "module's `_extra_state`, or a head that this model has not.",
        explanations.find_unexpected,
    ),
    Message(
        "'DeviceMesh' object has no attribute '_preserve_rank_order'",
        "torch 2.15, `load_state_dict`",
        "torch_version",
        "A file of a rank holds DTensors that an older torch pickled (2.13 did): meshes lack what 2.15 compares. "
        "`ckptkit reshard CKPT OUT --to N`, with as many ranks as it has, writes files that both load.",
    ),
    Message(
        "size mismatch for …: copying a param with shape … from checkpoint, the shape in current model is …",
        "torch and transformers",
        "shape",
        "The same name, and another shape. Where only the first number differs, of embedding and head, a vocabulary "
        "was padded: `--vocab-size` fixes it. Else the config is that of another model.",
        explanations.find_size_by_name,
    ),
    Message(
        "Size mismatch between saved … and current: … for …",
        "torch, `dcp.load`",
        "shape",
        "As above. A single large number as the current size is FSDP1's flat parameter: load inside "
        "`FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)`, or with `get_state_dict`.",
        explanations.find_size,
    ),
    Message(
        "You set `ignore_mismatched_sizes` to `False`, thus raising an error",
        "transformers 5",
        "shape",
        "The table above the message has the tensors with another shape. `ckptkit doctor CKPT --model MODEL` says why; "
        "`ignore_mismatched_sizes=True` would fill them with random numbers.",
        explanations.find_misfits,
    ),
    Message(
        "were not initialized from the model checkpoint at … and are newly initialized: …",
        "transformers 4",
        "missing",
        "A warning that is an error: these tensors are random now. The names in the file are others than those of the "
        "model: a prefix, a wrapper, an adapter, or another family.",
        explanations.find_misfits,
    ),
    Message(
        "LOAD REPORT…from: …",
        "transformers 5, with a table of names",
        "missing",
        "A warning that is an error where the table has `MISSING`: these tensors are random now. If as many are "
        "`UNEXPECTED`, their names in the file are others than those of the model: a prefix, a wrapper, an adapter, or "
        "another family. `MISMATCH` is another shape.",
        explanations.find_misfits,
    ),
    Message(
        "loaded state dict has a different number of parameter groups",
        "torch, `Optimizer.load_state_dict`",
        "groups",
        "The optimizer was made with another number of groups than the one that was saved: with and without weight "
        "decay, a rate for each layer. Make it as it was made then; `ckptkit doctor CKPT --like OTHER` compares.",
        explanations.find_groups,
    ),
    Message(
        "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        "torch, `Optimizer.load_state_dict`",
        "groups",
        "A group lists another number of parameters: some were frozen or added since, or an adapter was. Numbers tell "
        "nothing of names; with names the rest can be kept: `--optimizer-keys names`.",
        explanations.find_groups,
    ),
    Message(
        "The state of _OptimStateKey(… is empty. This should happen when use_orig_params=True.",
        "torch, FSDP1, when it saves",
        "optimizer_state",
        "A whole unit of FSDP1 had no gradient: a vision tower without pictures, experts without tokens. Wrap with "
        "`use_orig_params=True`, or freeze what is not trained. Nothing was saved.",
    ),
    Message(
        "is not in the optimizer state. The FSDPParamInfo has the param keys …",
        "torch, FSDP1, when it saves",
        "optimizer_state",
        "Of a unit of FSDP1 some parameters had a gradient and others none. Wrap those that are not trained, or not "
        "always, as units of their own. Nothing was saved.",
    ),
    Message(
        "used a DP world size of … but the current world size is ….",
        "DeepSpeed",
        "world_size",
        "ZeRO's files are those of as many ranks as saved them. A universal checkpoint is loaded by any number, with "
        '`"checkpoint": {"load_universal": true}`: `ckptkit convert SRC OUT --to universal`.',
        explanations.find_ranks,
    ),
    Message(
        "Unable to find latest file at …, if trying to load latest checkpoint",
        "DeepSpeed",
        "incomplete",
        "The directory above the tag is meant, in which the file `latest` names it; or the save did not finish, for "
        "`latest` is written last. A warning only: the training goes on from nothing.",
    ),
    Message(
        "Loading a checkpoint for MP=… but world size is …",
        "Meta's llama",
        "world_size",
        "`consolidated.*.pth` are the parts of tensor-parallel ranks, and as many processes load them. "
        "`ckptkit consolidate` makes one model of them.",
        explanations.find_ranks,
    ),
    Message(
        "No such file or directory: …",
        "Python, under `dcp.load`, verl and others",
        "incomplete",
        "Of `.metadata`: the save did not finish, or that file lies on the first node only. Of `__3_0` and the like: "
        "that rank's shard lies on another node. Of `model_world_size_8_rank_0.pt`: another number of ranks has saved.",
        explanations.find_file,
    ),
    Message(
        "metadata is None",
        "torch, `dcp.load`",
        "incomplete",
        "There is no `.metadata` that could be read: an unfinished save, the wrong directory, or, with `too many "
        "values to unpack` further up, metadata of a later torch.",
        explanations.find_version,
    ),
    Message(
        "too many values to unpack (expected 5",
        "torch before 2.15, `dcp.load`",
        "torch_version",
        "`.metadata` was written by torch 2.15 or later, which describes tensors by six properties. `ckptkit reshard` "
        "and `ckptkit convert --to dcp` write what every torch reads.",
        explanations.find_version,
    ),
    Message(
        "Invalid checkpoint metadata for …, expected BytesStorageMetadata but found …",
        "torch, `dcp.load`",
        "kind",
        "The checkpoint has a tensor where the state that is loaded into has a number, or nothing that is a tensor: a "
        "learning rate that became one, or a key of another level.",
        explanations.find_kind,
    ),
    Message(
        "Weights only load failed",
        "torch 2.6 and later, `torch.load`",
        "pickle",
        "The file holds Python objects beside tensors: arguments, a random state of numpy, a loss scaler. "
        "`weights_only=False` runs whatever code is in it. ckptkit reads the tensors without running any: "
        "`ckptkit consolidate` for the model, `ckptkit convert --to dcp` for all.",
        explanations.find_model,
    ),
    Message(
        "Unsupported operand …",
        "torch 2.6 and later, `torch.load`",
        "corrupt",
        "No file of torch.save: with `118` it is a pointer of git-lfs (`git lfs pull`), with `60` a web page.",
    ),
    Message(
        "files saved in the legacy .tar format",
        "torch 2.6 and later, `torch.load`",
        "corrupt",
        "A file of torch before 0.4, or far more often one of zeros: its blocks were never written, as when a disk was "
        "full or the power went.",
    ),
    Message(
        "filename 'storages' not found",
        "torch, `torch.load(weights_only=False)`",
        "corrupt",
        "As above: a file of zeros, or one that is older than torch 0.4.",
    ),
    Message(
        "EOFError: …",
        "Python, under `torch.load` and `dcp.load`",
        "corrupt",
        "With `Ran out of input`, or nothing more: the file is empty. The save ended before anything was written, or "
        "the disk was full. Take another checkpoint.",
    ),
    Message(
        "Error no file named … found in directory …",
        "transformers, `from_pretrained`",
        "no_model",
        "The directory is a training checkpoint, such as FSDP's `pytorch_model_fsdp_0` or shards of ZeRO, and "
        "`from_pretrained` wants safetensors: `ckptkit consolidate CKPT OUT`. Several files of safetensors need an "
        "index: `ckptkit doctor MODEL --fix OUT` writes one.",
        explanations.find_model,
    ),
    Message(
        "Can't find a valid checkpoint at …",
        "transformers, `Trainer`",
        "no_model",
        "The Trainer looks for a model's file or for FSDP's directories, and the strategy that it runs with now is not "
        "the one that saved: FSDP's shards need `--fsdp` again. `ckptkit inspect` says what is there.",
        explanations.find_model,
    ),
    Message(
        "Parameter '…' found in sharded model state dict but missing from full state dict",
        "Accelerate, FSDP2",
        "missing",
        "The model that is loaded into was wrapped or compiled otherwise than the one in the file. `ckptkit doctor "
        "CKPT --model MODEL` names the rule by which the names differ.",
        explanations.find_parameter,
    ),
    Message(
        "PytorchStreamReader failed …",
        "torch, `torch.load`",
        "corrupt",
        "The file is cut short, or is no file of torch.save: a save that was killed, a full disk, a copy that broke "
        "off. `ckptkit verify` says which of the files; take another checkpoint.",
    ),
    Message(
        "Error while deserializing header: …",
        "safetensors",
        "corrupt",
        "The file is cut short (`incomplete metadata`, before `MetadataIncompleteBuffer`), or no safetensors (`header "
        "too large`, `header too small`, `invalid header`): a download that broke off, a pointer of git-lfs, or a "
        "`model.safetensors` of empty FSDP shards beside the real ones. `ckptkit verify` names it. With `unknown "
        "variant`, an entry has no dtype: `ckptkit doctor MODEL --fix OUT` drops it.",
    ),
    Message(
        "invalid load key, …",
        "Python's pickle, under `torch.load`",
        "corrupt",
        "No file of torch.save: with `'v'` it is a pointer of git-lfs (`git lfs pull`), with `'<'` a web page, and "
        "with `'\\x00'` a file that was never written.",
    ),
)
