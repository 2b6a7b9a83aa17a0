"""Run `ckptkit prove`, which checks that an export computes the same as its source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptkit.cli.conversion import Jobs, Map
from ckptkit.cli.options import Also, join_also_directories
from ckptkit.cli.output import (
    Json,
    pick,
    print_json,
    print_note,
    print_text_line,
    progress_bar,
    reserve_stdout,
    to_json_value,
)
from ckptkit.errors import and_more
from ckptkit.io.path import to_path
from ckptkit.words import command_line, count, format_bytes

if TYPE_CHECKING:
    from ckptkit.plugins.prove.model import Logits
    from ckptkit.plugins.prove.prove import Proved


def prove(
    out: Annotated[Path, typer.Argument(parser=to_path, metavar="OUT", help="The exported Hugging Face model.")],
    against: Annotated[
        Path, typer.Option(parser=to_path, metavar="SRC", help="The checkpoint or run that OUT was exported from.")
    ],
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Directory or Hub id with the config.json to use for SRC.")
    ] = None,
    map: Map = None,  # noqa: A002 - the name of the option
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="'REGEX=>TEXT'", help="Rename the parameters of SRC first; repeatable."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|1,2,3", help="Tokens to compute with; by default 64 or more random tokens, see above."
        ),
    ] = None,
    also: Also = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random tokens.")] = 0,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Prove that an export computes the same as the training state.

    First ckptkit compares config.json and all tensors with those of the checkpoint; names and dtypes may differ. Then
    transformers runs both models on the same tokens, in float32 and block by block: no more than one block is in
    memory. Without --tokens, ckptkit takes 64 random tokens, or more than the longest sliding window or original
    context length, if so many fit into memory. It names the lengths that it did not reach. If dtypes differ, ckptkit
    prints how much rounding changes the logits, and fails if rounding does not explain the difference.

    Example: ckptkit prove out --against run/ckpt-500

    Exit codes: 0 proved; 1 not proved; 2 usage; 3 one is not a checkpoint, or not a model that transformers knows; 4 an
    I/O failure.
    """
    from ckptkit.plugins.prove.prove import prove as run_it

    reserve_stdout()
    against = join_also_directories(against, also)
    with progress_bar("prove") as progress:
        proved = run_it(
            out,
            against=against,
            base=base,
            map=map,
            rename=rename or (),
            tokens=tokens,
            seed=seed,
            jobs=jobs,
            progress=progress,
        )
    if json:
        tensors = [
            pick(diff, "a", "b", "tensors", "nbytes", "only_in_a", "only_in_b")
            | {"equal": diff.is_equal, "different": [one.name for one in diff.different]}
            for diff in proved.tensors
        ]
        logits = {"ok": proved.logits.is_ok, **to_json_value(proved.logits)}
        configs = [pick(one, "key", "here", "there") for one in proved.configs]
        result = {"ok": proved.is_ok, **pick(proved, "out", "source", "notes", "unreached"), "configs": configs}
        result |= {"tensors": tensors, "logits": logits}
        print_json(result)
    else:
        report(proved)
    if not proved.is_ok:
        raise typer.Exit(1)


def report(proved: Proved) -> None:
    """Print notes, the comparison of tensors and logits, and the verdict last."""
    for text in dict.fromkeys([*proved.notes, *(text for diff in proved.tensors for text in diff.notes)]):
        print_note(f"note: {text}")
    for diff in proved.tensors:
        amount = f"{count(diff.tensors, 'tensor')}, {format_bytes(diff.nbytes)}"
        if diff.is_equal:
            print_text_line(f"the tensors are the same: {amount}")
            continue
        names = [*(one.name for one in diff.different), *diff.only_in_a, *diff.only_in_b]
        print_text_line(
            f"the tensors are not the same: {', '.join(names[:3])}{and_more(len(names) - 3)}; compared: {amount}"
        )
        print_note(f"hint: {command_line('diff', diff.a, diff.b, '--allow-cast')} says by how much they differ")
    print_text_line(describe_logit_difference(proved.logits))
    for line in proved.summary():
        print_text_line(line)


def describe_logit_difference(logits: Logits) -> str:
    tokens = count(logits.tokens, "token")
    if logits.max_abs == 0:
        return f"the logits of {tokens} are the same"
    why = "with rounded weights" if logits.rounded else "with the same dtypes"
    if logits.rounded and logits.unexplained:
        why += f" and {logits.unexplained:.3g} that rounding does not explain"
    first = f"; {logits.first} is the first block to differ" if logits.first and not logits.is_ok else ""
    return (
        f"the logits of {tokens}, {why}: mean KL {logits.kl:.3g} nats, at most {logits.max_kl:.3g}; they differ by up "
        f"to {logits.max_abs:.3g} (the largest logit is {logits.scale:.3g}); the most likely next token is the same at "
        f"{logits.same_choice} of {tokens}{first}"
    )
