"""Know the checkpoints of scripts that call torch themselves, and the names that such scripts give."""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer

_NAMES = {"dcp": "torch.distributed.checkpoint", "pt": "torch.save"}


def wrote(seen: Evidence) -> str | None:
    """Return the part of torch that writes this format; safetensors are torch's where ranks wrote their shards."""
    if seen.format == "hf":
        return None if seen.world_size is None else "torch.distributed.checkpoint, as safetensors"
    return _NAMES.get(seen.format or "")


PLAIN = Trainer(
    name="torch",
    wrote=wrote,
    steps=(r"(?:ep(?:och)?[-_]?[0-9]+[-_])?(?:ckpt|checkpoint|step|global_step|iter|ba)[-_]?([0-9]{1,18})(?:_ckp)?",),
    epochs=(r"epoch(?:[-_]?|=)([0-9]{1,18})(?:\.ckpt)?",),
    step_keys=(("", ("step",)), ("", ("global_step",))),
    trackers=("latest", "latest.txt", "LATEST", "LOWEST_VAL"),
)
