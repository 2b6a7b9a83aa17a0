"""Run `ckptkit consolidate`, `convert`, `reshard`, `average`, `merge` and `finalize`: options in, report out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.cli.conversion import (
    OPTIONS,
    Jobs,
    NoSync,
    Out,
    Source,
    To,
    ToOrAdapter,
    Yes,
    complete_given_options,
    parse_factors,
    print_result,
)
from ckptkit.cli.options import Also, join_also_directories, join_also_if_single, with_options
from ckptkit.cli.output import Json, progress_bar
from ckptkit.io.destination import to_destination
from ckptkit.io.path import to_model_path, to_path

# options for the conversion of a single checkpoint; `merge` and `average` do not have them
_OF_ONE = (
    *("world_size", "under", "optimizer_keys", "optimizer_order", "complete_optimizer", "merge"),
    *("from_base", "text_only", "quantize", "exclude_quantize", "salvage", "fill_from"),
)
# options that `reshard` does not have, because it keeps everything
_OF_OTHERS = (
    *("world_size", "under", "optimizer_keys", "max_shard_size", "base", "strict", "merge", "adapter_config"),
    *("from_base", "quantize", "exclude_quantize", "experts_layout", "experts"),
)


@with_options(OPTIONS, leave_out=("world_size", "under", "optimizer_keys", "optimizer_order", "complete_optimizer"))
def consolidate(
    src: Source,
    out: Out,
    also: Also = None,
    yes: Yes = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Turn a training checkpoint into a Hugging Face model.

    Writes safetensors files, config and tokenizer.

    Example: ckptkit consolidate run/ckpt-500 out

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or does not fit its config; 4 an I/O failure,
    OUT is unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.conversion.convert import consolidate as run

    src = join_also_directories(src, also)
    with progress_bar("consolidating") as progress:
        done = run(src, out, **complete_given_options(options, out, yes=yes), progress=progress)
    print_result(src, done, "consolidated", yes=yes, json=json)


@with_options(OPTIONS)
def convert(
    src: Source,
    out: Out,
    to: ToOrAdapter = None,
    also: Also = None,
    yes: Yes = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Convert a checkpoint to another format.

    The formats dcp and pt keep the optimizer and everything else.

    Example: ckptkit convert Llama-3.2-1B start --to dcp --world-size 8 --under model

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or not supported; 4 an I/O failure, OUT is
    unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.conversion.convert import convert as run

    src = join_also_directories(src, also)
    with progress_bar("converting") as progress:
        done = run(src, out, to=to, **complete_given_options(options, out, yes=yes), progress=progress)
    print_result(src, done, "converted", yes=yes, json=json)


@with_options(OPTIONS, leave_out=_OF_OTHERS)
def reshard(
    to: Annotated[int, typer.Option(min=1, metavar="N", help="The number of ranks.")],
    src: Annotated[
        Path | None,
        typer.Argument(
            parser=to_path, metavar="SRC", help="A checkpoint or a run; by default run/, or else the current directory."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Argument(
            parser=to_destination, metavar="OUT", help="The directory to write, or a URL; by default SRC-toN."
        ),
    ] = None,
    also: Also = None,
    yes: Yes = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Rewrite a checkpoint for another number of ranks.

    Keeps everything, including the optimizer.

    Example: ckptkit reshard run/ckpt-500 --to 16

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or not supported; 4 an I/O failure, OUT is
    unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.conversion.convert import default_source
    from ckptkit.conversion.convert import reshard as run

    src = join_also_directories(src or default_source(), also) if also else src
    with progress_bar("resharding") as progress:
        done = run(src, out, to=to, **complete_given_options(options, out, yes=yes), progress=progress)
    print_result(src, done, "resharded", yes=yes, json=json)


@with_options(OPTIONS, leave_out=(*_OF_ONE, "adapter_config", "experts_layout", "experts"))
def average(
    sources: Annotated[
        list[Path],
        typer.Argument(
            parser=to_path,
            metavar="SRC",
            help="At least two checkpoints or runs (their latest), or one run with --last.",
        ),
    ],
    out: Out,
    factors: Annotated[
        str,
        typer.Option(
            metavar="F,F,...", help="A factor for each checkpoint; by default all are equal. 3,1 means 0.75,0.25."
        ),
    ] = "",
    last: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Average the last K complete checkpoints of one run.")
    ] = None,
    to: To = "hf",
    also: Also = None,
    yes: Yes = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Write the weighted mean of several checkpoints.

    Use it for a model soup, or to smooth the last checkpoints of a run.

    Example: ckptkit average run out --last 5

    All checkpoints must have the same tensors in the same shapes; formats, world sizes and dtypes may differ. ckptkit
    sums in float64 and rounds once at the end. Exit codes: 0 done; 2 usage; 3 a checkpoint is damaged, or the
    checkpoints do not belong to one model; 4 an I/O failure, OUT is unchanged; 5 OUT exists, or a path is unsafe; 130
    interrupted.
    """
    from ckptkit.conversion.combine import average as run

    sources = join_also_if_single(sources, also, "pass one run and --last K")
    with progress_bar("averaging") as progress:
        wanted = {"to": to, **complete_given_options(options, out, yes=yes)}
        done = run(sources, out, weights=parse_factors(factors), last=last, **wanted, progress=progress)
    print_result(done.source, done, "averaged", yes=yes, json=json)


@with_options(OPTIONS, leave_out=(*_OF_ONE, "experts", "names", "map", "vocab_size"))
def merge(
    model: Annotated[
        Path, typer.Argument(parser=to_model_path, metavar="BASE", help="The model, or its id on the Hub.")
    ],
    adapters: Annotated[
        list[Path],
        typer.Argument(
            parser=to_path, metavar="ADAPTER", help="A saved adapter, or a training checkpoint that contains one."
        ),
    ],
    out: Out,
    factors: Annotated[str, typer.Option(metavar="F,F,...", help="A factor for each adapter; by default 1.")] = "",
    to: To = "hf",
    also: Also = None,
    yes: Yes = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Merge LoRA adapters into their base.

    Works block by block: a whole model is never in memory.

    Example: ckptkit merge meta-llama/Llama-3.1-8B run/checkpoint-500 out

    ckptkit computes each weight in float32 and rounds it once. If the checkpoint contains the base, use `ckptkit
    consolidate --merge`. Exit codes: 0 done; 2 usage; 3 an adapter is damaged, does not fit, or uses an unknown method;
    4 an I/O failure, OUT is unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.conversion.combine import merge as run

    hint = "`ckptkit consolidate ADAPTER OUT --also DIR` makes one directory of each"
    adapters = join_also_if_single(adapters, also, hint)
    with progress_bar("merging") as progress:
        wanted = {"to": to, **complete_given_options(options, out, yes=yes)}
        done = run(model, adapters, out, weights=parse_factors(factors), **wanted, progress=progress)
    print_result(model, done, "merged", yes=yes, json=json)


def finalize(
    out: Annotated[
        Path, typer.Argument(parser=to_destination, metavar="OUT", help="The output that --part jobs wrote.")
    ],
    jobs: Jobs = None,
    no_sync: NoSync = False,
    json: Json = False,
) -> None:
    """Finish an output that several jobs wrote with --part.

    First checks that all parts are there.

    Example: ckptkit finalize out

    Exit codes: 0 done; 3 OUT has no parts, or the checkpoint is damaged; 4 an I/O failure; 5 a part is missing or
    still running; 130 interrupted.
    """
    from ckptkit.conversion.finalize import finalize as run

    with progress_bar("finishing") as progress:
        done = run(out, jobs=jobs, sync=not no_sync, progress=progress)
    print_result(done.source, done, "made", json=json)
