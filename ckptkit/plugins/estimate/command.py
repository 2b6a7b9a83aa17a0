"""Run `ckptkit estimate`, which tells whether a training fits into GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.output import Json, print_json, print_note, print_table, print_text_line
from ckptkit.words import count, format_bytes, format_count

if TYPE_CHECKING:
    from ckptkit.plugins.estimate.estimate import Estimated
    from ckptkit.plugins.estimate.memory import Budget, Setup

STATES = ("parameters", "gradients", "optimizer")
UNITS = ("gathered", "reduced")
BAR = 20  # columns
CHECKPOINTS = {
    "model": "model, in shards or one file",
    "model_and_optimizer": "model and optimizer, in shards or one file",
    "export_float32": "export in float32",
    "export_bfloat16": "export in bfloat16",
}


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A size such as 8b (see `ckptkit train --model`), a config.json, its directory or a Hub id.",
        ),
    ],
    world_size: Annotated[int, typer.Option("--world-size", help="The total number of GPUs.")],
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", metavar="full_shard|shard_grad_op|hybrid_shard|ddp", help="Show one strategy in detail."
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Copies of the model with hybrid_shard; by default 2.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, such as 80GB.")
    ] = None,
    micro_batch_size: Annotated[
        int, typer.Option("--micro-batch-size", help="Sequences that a GPU computes at once.")
    ] = 1,
    sequence_length: Annotated[
        int | None,
        typer.Option("--sequence-length", help="Tokens per sequence; by default the model's longest, or 4096."),
    ] = None,
    param_dtype: Annotated[
        str, typer.Option("--param-dtype", metavar="bf16|fp32", help="Dtype to compute in.")
    ] = "bf16",
    master_dtype: Annotated[
        str, typer.Option("--master-dtype", metavar="bf16|fp32", help="Dtype to store and update in.")
    ] = "fp32",
    recompute_every: Annotated[
        int, typer.Option("--recompute-every", help="Recompute the activations of every n-th block; 0: none.")
    ] = 1,
    prefetch: Annotated[int, typer.Option("--prefetch", help="Blocks to gather ahead of the current one.")] = 1,
    cpu_offload: Annotated[
        bool, typer.Option("--cpu-offload", help="Keep shards, gradients and optimizer in host memory.")
    ] = False,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", help="Vocabulary size, if MODEL is a size such as 8b; by default 256, for bytes."),
    ] = None,
    untied: Annotated[
        bool,
        typer.Option("--untied", help="Do not share embedding and output weights, if the model is a size such as 8b."),
    ] = False,
    json: Json = False,
) -> None:
    """Estimate the memory that training needs on each GPU.

    Shows each strategy, and the sizes of checkpoints.

    The estimate is for full training with AdamW. The defaults are bf16 and --recompute-every 1. `ckptkit train` uses
    --recompute-every 0 by default: pass that to estimate such a run. ckptkit reads only the model's config: it builds
    no model and reads no weights.

    Example: ckptkit estimate meta-llama/Llama-3.1-8B --world-size 8 --gpu-memory 80GB

    Exit codes: 0 done; 1 no strategy fits into `--gpu-memory`, or `--strategy` does not; 2 usage; 3 MODEL is not the
    config of a model, or ckptkit cannot count its parameters; 4 an I/O failure.
    """
    from ckptkit.plugins.estimate.estimate import estimate as count_bytes

    estimated = count_bytes(
        model,
        world_size=world_size,
        vocab_size=vocab_size,
        untied=untied,
        strategy=strategy,
        replicas=replicas,
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        param_dtype=param_dtype,
        master_dtype=master_dtype,
        recompute_every=recompute_every,
        prefetch=prefetch,
        cpu_offload=cpu_offload,
        gpu_memory=gpu_memory,
    )
    if json:
        print_json(to_json(estimated))
    else:
        report(estimated, in_detail=strategy is not None)
    if gpu_memory is not None and not any(map(estimated.fits, estimated.budgets)):
        raise typer.Exit(1)


def report(estimated: Estimated, *, in_detail: bool) -> None:
    model, setup = estimated.model, estimated.budgets[0].setup
    parameters = f"{format_count(model.numel)} parameters with a vocabulary of {model.vocabulary:,}"
    print_text_line(f"{model.model_type}: {parameters}")
    blocks = f"{count(model.layers, 'block')} of {format_count(model.largest_block_numel)}"
    print_text_line(f"{blocks} and {format_count(model.root_unit_numel)} outside the blocks")
    largest = format_bytes(estimated.largest_unit)
    print_text_line(f"largest unit that is gathered at once: {largest} in {setup.param_dtype}")
    every = {0: "nothing", 1: "every block"}
    recomputed = every.get(setup.recompute_every, f"one block of {setup.recompute_every}")
    batch = f"{count(setup.micro_batch_size, 'sequence')} of {count(setup.sequence_length, 'token')}"
    stored = f"{recomputed} recomputed; parameters stored in {setup.master_dtype}"
    print_text_line(f"on each of {count(setup.world_size, 'GPU')}: {batch}, {stored}")
    print_text_line("")
    if in_detail:
        print_detail(estimated.budgets[0])
    else:
        print_strategies(estimated)
    if estimated.gpu_memory is not None:
        for budget in estimated.budgets:
            print_text_line(describe_fit(estimated, budget))
    print_text_line("")
    sizes = [(CHECKPOINTS[kind], format_bytes(nbytes)) for kind, nbytes in estimated.disk.items()]
    print_table(sizes, ("on disk", "size"))
    for text in estimated.notes:
        print_note(f"note: {text}")


def print_strategies(estimated: Estimated) -> None:
    """Print a row per strategy, at its peak, with a column for host memory if any is used."""
    print_text_line("states: parameters, gradients and optimizer; units: gathered parameters and their gradients")
    rows = []
    for budget in estimated.budgets:
        parts = budget.peak_bytes_by_component
        states, units = (sum(parts[component] for component in components) for components in (STATES, UNITS))
        sizes = [states, units, parts["activations"], parts["logits"], budget.peak, *filter(None, [budget.host])]
        rows.append((strategy_label(budget.setup), *map(format_bytes, sizes), budget.peak_moment))
    host = ["host"] if estimated.budgets[0].host else []
    print_table(rows, ("strategy", "states", "units", "activations", "logits", "peak", *host, "peak in"))


def strategy_label(setup: Setup) -> str:
    layout = f" {setup.replicas} x {setup.shard_count}" if setup.strategy == "hybrid_shard" else ""
    return setup.strategy + layout


def print_detail(budget: Budget) -> None:
    """Print the memory of one strategy at each moment of a step, with bars for its peak."""
    print_text_line(f"{strategy_label(budget.setup)}, at each moment of a step; the bars show `{budget.peak_moment}`")
    moments = budget.moments
    rows: list[Sequence[str]] = []
    for component, at_peak in budget.peak_bytes_by_component.items():
        sizes = [parts[component] for parts in moments.values()]
        if any(sizes):
            rows.append((component, *map(format_bytes, sizes), "█" * round(BAR * at_peak / budget.peak)))
    totals = [format_bytes(sum(parts.values())) for parts in moments.values()]
    print_table([*rows, ("in all", *totals, "")], ("", *moments, ""))
    if budget.host:
        print_text_line(f"host: {format_bytes(budget.host)} per GPU")


def describe_fit(estimated: Estimated, budget: Budget) -> str:
    """Return whether a strategy fits; if not, on how many GPUs it would."""
    assert estimated.gpu_memory is not None
    name = strategy_label(budget.setup)
    needs = f"needs {format_bytes(budget.peak)}, each GPU has {format_bytes(estimated.gpu_memory)}"
    if estimated.fits(budget):
        return f"{name} fits: {needs}"
    enough = estimated.fits_at(budget)
    remedy = f"it would fit on {count(enough, 'GPU')}" if enough else "more GPUs do not help"
    return f"{name} does not fit: {needs}; {remedy}"


def to_json(estimated: Estimated) -> dict[str, Any]:
    """Return the estimate under the JSON keys that scripts rely on; all sizes are in bytes."""
    model, setup = estimated.model, estimated.budgets[0].setup
    settings = {name: value for name, value in asdict(setup).items() if name not in {"strategy", "replicas"}}
    return {
        "model": {
            "model_type": model.model_type,
            "parameters": model.numel,
            "layers": model.layers,
            "block_parameters": model.largest_block_numel,
            "root_parameters": model.root_unit_numel,
        },
        "setup": settings | {"param_dtype": setup.param_dtype.name, "master_dtype": setup.master_dtype.name},
        "largest_unit_bytes": estimated.largest_unit,
        "gpu_memory_bytes": estimated.gpu_memory,
        "strategies": [
            {
                "strategy": budget.setup.strategy,
                "shards": budget.setup.shard_count,
                "replicas": budget.setup.world_size // budget.setup.shard_count,
                "peak_bytes": budget.peak,
                "peak_at": budget.peak_moment,
                "moments": budget.moments,
                "host_bytes": budget.host,
                "fits": estimated.fits(budget),
                "fits_at": estimated.fits_at(budget),
            }
            for budget in estimated.budgets
        ],
        "disk_bytes": estimated.disk,
        "notes": estimated.notes,
    }
