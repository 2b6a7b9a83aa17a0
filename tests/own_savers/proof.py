"""What the scripts of this directory share: a directory, ranks of torchrun, ckptkit's command line, a tiny Llama."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A script has the name of its trainer's library: the library must be found first. A process that the library spawns
# imports the script again, and this module with it.
sys.path.remove(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent))

WORDS = 200  # of the tiny Llama
STEPS, SAVED = 4, 2  # of a training, and up to its first checkpoint
LENGTH = 12  # of a row of tokens


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


def write_llama(base: Path, **options: Any) -> None:
    """Write a tiny Llama with its tokenizer, as transformers does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(base)
    write_tokenizer(base, WORDS)


def write_rows(path: Path, row: Callable[[str], Mapping[str, str]]) -> None:
    """Write 32 rows of JSON. Their texts have one length: the loss does not depend on how ranks share the rows."""
    texts = (" ".join(f"w{(seed * 31 + place * 7) % (WORDS - 4)}" for place in range(8)) for seed in range(32))
    path.write_text("".join(json.dumps(row(text)) + "\n" for text in texts))


def check_logits(name: str, expected: Any, found: Any, *, tolerance: float = 0) -> None:
    """Compare the logits of two models of transformers on a few tokens."""
    import torch

    tokens = torch.arange(4, 12).unsqueeze(0)
    with torch.no_grad():
        difference = (expected.eval()(tokens).logits - found.eval()(tokens).logits).abs().max().item()
    assert difference <= tolerance, f"{name}: logits differ by {difference}"


def check_export(name: str, model: Path, logits: Path) -> None:
    """Compare a model, opened by transformers, with the logits in a file, for one row with the first tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(model)(torch.arange(LENGTH).unsqueeze(0)).logits
    difference = (found - torch.load(logits)).abs().max().item()
    assert difference < 1e-5, f"{name}: logits differ by {difference}"


def check_fine_tuning(
    root: Path,
    write_config: Callable[..., Path],
    lora: Mapping[str, Any],
    *,
    title: str,
    base: Sequence[object] = (),
    resumes: Sequence[str] = ("full", "lora"),
    depends_on_ranks: bool = False,
) -> None:
    """Check a trainer that saves as transformers' Trainer does: all weights and a LoRA, on 2 ranks, resumed on 1.

    `write_config(root, name, ranks, **options)` writes the configuration of a run into the directory `root / name`.
    The script runs it, saves the trained weights as `trained.pt`, and the LoRA's config. `base` are the options of
    `consolidate` for all weights, `resumes` the runs that the trainer can resume from its shards. If the batches of a
    step depend on the ranks, the losses are compared with those of the trainer's own resume on 1 rank.
    """
    options: dict[str, Mapping[str, Any]] = {"full": {}, "lora": lora}
    ranks(2, *(write_config(root, kind, 2, **more) for kind, more in options.items()))
    for kind in options:
        last = root / kind / f"checkpoint-{STEPS}"
        said = ckptkit("inspect", last)
        assert f"trainer: {title}" in said, f"{kind}: {said}"
        ckptkit("verify", last)
        ckptkit("reshard", root / kind / f"checkpoint-{SAVED}", root / f"{kind}-on-1", "--to", 1)
    _check_full(root, base)
    _check_lora(root)
    sources = {"resumed": "{kind}-on-1", **({"own": f"{{kind}}/checkpoint-{SAVED}"} if depends_on_ranks else {})}
    resumed = {
        f"{kind}-{name}": {**options[kind], "resume_from_checkpoint": f"{root}/{source.format(kind=kind)}"}
        for kind in resumes
        for name, source in sources.items()
    }
    ranks(1, *(write_config(root, name, 1, **more) for name, more in resumed.items()))
    for kind in resumes:
        expected, found = (
            logged_losses(root / name / f"checkpoint-{STEPS}", root / f"{name}-losses.json")
            for name in (f"{kind}-own" if depends_on_ranks else kind, f"{kind}-resumed")
        )
        check_losses(kind, expected, found)


def _check_full(root: Path, base: Sequence[object]) -> None:
    """Compare the model that ckptkit writes with the trained one."""
    import torch
    from transformers import AutoModelForCausalLM

    ckptkit("consolidate", root / "full" / f"checkpoint-{STEPS}", root / "out", *base)
    trained = AutoModelForCausalLM.from_pretrained(root / "base")
    trained.load_state_dict(torch.load(root / "full" / "trained.pt"))
    check_logits("full", trained, AutoModelForCausalLM.from_pretrained(root / "out"))


def _check_lora(root: Path) -> None:
    """Compare the adapter that ckptkit exports, and its merge, with the trained model."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    last = root / "lora" / f"checkpoint-{STEPS}"
    trained, again = (AutoModelForCausalLM.from_pretrained(root / "base") for _ in range(2))
    trained = get_peft_model(trained, LoraConfig.from_pretrained(str(root / "lora")))
    trained.load_state_dict(torch.load(root / "lora" / "trained.pt"))
    ckptkit("consolidate", last, root / "adapter")
    ckptkit("merge", root / "base", last, root / "merged")
    check_logits("adapter", trained, PeftModel.from_pretrained(again, root / "adapter"))
    check_logits("merged", trained, AutoModelForCausalLM.from_pretrained(root / "merged"), tolerance=1e-5)


def logged_losses(checkpoint: Path, output: Path) -> Path:
    """Write the losses that transformers' Trainer logged up to a checkpoint, by step, and return the file."""
    log = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    output.write_text(json.dumps({str(entry["step"]): entry["loss"] for entry in log if "loss" in entry}))
    return output


def torchvision_on_cpu() -> None:
    """Let torchvision be imported where its library, which PyPI has for CUDA only, cannot be loaded."""
    import torch

    if torch.version.cuda is not None:  # the library of PyPI loads, also without a GPU
        return
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._torchvision_operators = operators  # type: ignore[attr-defined]  # they go with the object
