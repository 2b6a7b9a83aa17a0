"""What people type before they read the help, and the names that they mean. No help shows these."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# Accepted: commands, and options of a command.
SYNONYMS = {
    "export": "consolidate",
    **dict.fromkeys(("info", "show"), "inspect"),
    **dict.fromkeys(("check", "validate"), "verify"),
    "compare": "diff",
    "list": "ls",
    "copy": "cp",
    "upload": "push",
    "download": "pull",
}
OPTION_SYNONYMS = {
    "consolidate": dict.fromkeys(("--model", "--config"), "--base"),
    "reshard": dict.fromkeys(("--world-size", "--ranks", "--gpus", "--nproc"), "--to"),
    "convert": {**dict.fromkeys(("--ranks", "--gpus"), "--world-size"), "--format": "--to"},
    "estimate": {**dict.fromkeys(("--ranks", "--gpus", "--nproc"), "--world-size"), "--seq-len": "--sequence-length"},
    "train": {
        **dict.fromkeys(("--world-size", "--ranks", "--gpus", "--nproc-per-node"), "--nproc"),
        "--learning-rate": "--lr",
        "--max-steps": "--steps",
        "--seq-len": "--sequence-length",
        **dict.fromkeys(("--save-steps", "--save-interval"), "--save-every"),
    },
    "smoke": dict.fromkeys(("--world-size", "--ranks", "--gpus"), "--nproc"),
}

# Answered with another command line: they ask for what a command has no word for, or delete something.
_COMMANDS = {
    **dict.fromkeys(("fix", "repair"), "doctor CKPT --fix OUT"),
    **dict.fromkeys(("salvage", "recover", "rescue"), "consolidate SRC OUT --salvage"),
    **dict.fromkeys(("delete", "remove", "rm", "clean"), "prune RUN"),
    **dict.fromkeys(("split", "shard"), "reshard SRC OUT --to N"),
    **dict.fromkeys(("unshard", "gather", "to-hf", "hf", "safetensors"), "consolidate SRC OUT"),
    "quantize": "consolidate SRC OUT --quantize fp8-block",
    "resume": "train RUN --resume auto",
    "status": "ls RUN",
    "version": "--version",
}
# Answered with the first of these options that the command has.
_OPTIONS = {
    **dict.fromkeys(("--force", "-f"), ("--overwrite", "--yes")),
    **dict.fromkeys(("--key", "--prefix"), ("--under", "--include")),
    **dict.fromkeys(("--keys", "--verbose", "-v"), ("--tensors", "--all")),
    "--map": ("--shards",),
    "--quick": ("--fast",),
    "--repair": ("--fix",),
    "--tolerance": ("--rtol",),
    **dict.fromkeys(("--workers", "--threads"), ("--jobs",)),
    **dict.fromkeys(("--checkpoint", "--ckpt"), ("--resume",)),
}
_ARGUMENTS = {"--out", "--output", "--output-dir", "-o", "--dst", "--input", "-i", "--src", "--checkpoint", "--run"}
_FORMATS = {
    **dict.fromkeys(("safetensors", "huggingface", "transformers"), "hf"),
    **dict.fromkeys(("fsdp", "sharded", "distcp"), "dcp"),
    **dict.fromkeys(("torch", "pth", "bin"), "pt"),
    "lora": "adapter",
}


def hint_on_command(name: str, commands: Iterable[str]) -> str:
    """Return what to run in the place of a command that there is not."""
    near = get_close_matches(name, commands, n=1, cutoff=0.75)
    return f"run `ckptkit {_COMMANDS.get(name, near[0] if near else '--help')}`"


def hint_on_option(command: str, usage: str, guess: str, options: Iterable[str]) -> str:
    """Return what to pass in the place of an option that a command does not have; `usage` shows its arguments."""
    known = list(options)
    found = [name for name in _OPTIONS.get(guess, ()) if name in known][:1] or alike(guess, known)
    if found:
        *first, last = found
        return f"pass {', '.join(first)} or {last}" if first else f"pass {last}"
    if guess in _ARGUMENTS:
        return f"pass it without an option: `{command} {usage}`"
    if guess in ("--to", "--format"):
        return "run `ckptkit convert SRC OUT --to FORMAT` for another format"
    return f"run `{command} --help`"


def alike(guess: str, options: Iterable[str]) -> list[str]:
    """Return the options that share most words with another name, or else are spelled nearly like it."""
    words = set(guess.strip("-").split("-"))
    shared = {name: len(words & set(name.strip("-").split("-"))) for name in options}
    most = max(shared.values(), default=0)
    return [name for name in shared if shared[name] == most] if most else get_close_matches(guess, shared, cutoff=0.8)


def hint_on_format(name: str) -> str | None:
    """Return the format of ckptkit's that people mean by another name, None if there is none."""
    found = _FORMATS.get(name.lower())
    return found and f"pass --to {found}"
