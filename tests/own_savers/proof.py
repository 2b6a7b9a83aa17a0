"""What the scripts of this directory share: their directory, ranks of torchrun, ckptkit's command line, a tokenizer."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A script has the name of its trainer's library: the library must be found first.
sys.path.remove(str(Path(__file__).parent))


@contextmanager
def directory() -> Iterator[Path]:
    """Yield the directory for everything that a script writes: `--keep DIR`, or one that is removed at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path, metavar="DIR")
    keep = parser.parse_args().keep
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def call(*command: object, cwd: Path | None = None) -> str:
    """Run a command, and return what it printed; if it fails, exit with its output."""
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=900, check=False
    )
    if ended.returncode:
        raise SystemExit(f"$ {' '.join(map(str, command))}\n{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}")
    return ended.stdout


def ckptkit(*arguments: object) -> str:
    """Run a ckptkit command, show it with its output, and return the output."""
    printed = call(sys.executable, "-m", "ckptkit", *arguments)
    print(f"$ ckptkit {' '.join(map(str, arguments))}\n{printed}")
    return printed


def refused(*arguments: object) -> str:
    """Run a ckptkit command that must fail, show it with its error, and return the error."""
    command = [sys.executable, "-m", "ckptkit", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    print(f"$ ckptkit {' '.join(map(str, arguments))}\n{ended.stderr}")
    assert ended.returncode, f"ckptkit {' '.join(map(str, arguments))} did not fail"
    return ended.stderr


def ranks(number: int, *arguments: object, cwd: Path | None = None) -> str:
    """Run this script again on a number of ranks, and return what they printed."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}")
    return call(*launcher, Path(sys.argv[0]).resolve(), *arguments, cwd=cwd)


def check_losses(name: str, expected: Path, found: Path, *, tolerance: float = 1e-5) -> None:
    """Compare the losses by step in two JSON files, for the steps in the second."""
    whole, resumed = (json.loads(path.read_text()) for path in (expected, found))
    assert resumed, f"{name}: no step was trained"
    for step, loss in resumed.items():
        assert abs(loss - whole[step]) <= tolerance, f"{name}: step {step}: expected loss {whole[step]}, found {loss}"


def fsdp_on_cpu() -> None:
    """Let Accelerate turn on FSDP on a CPU, which it does on accelerators only (`AcceleratorState.__init__`)."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    start = AcceleratorState.__init__

    def start_with_fsdp(state: AcceleratorState, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        start(state, *arguments, fsdp_plugin=fsdp_plugin, **options)
        state.fsdp_plugin = fsdp_plugin or getattr(state, "fsdp_plugin", None)
        if state.fsdp_plugin is not None:  # each further call of the singleton forgets it
            state.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = start_with_fsdp


def write_tokenizer(model: Path, words: int) -> None:
    """Write a tokenizer of transformers with the words `w0`, `w1`, ..., as many as `words` with its special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<s>", "</s>", "<unk>")
    vocabulary = [*special, *(f"w{number}" for number in range(words - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(model)


def logged_losses(checkpoint: Path, output: Path) -> Path:
    """Write the losses that transformers' Trainer logged up to a checkpoint, by step, and return the file."""
    log = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    output.write_text(json.dumps({str(entry["step"]): entry["loss"] for entry in log if "loss" in entry}))
    return output
