"""Measure turning the names of other libraries into the Hub's, against keeping them. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.shapes import Shapes, llama_of
from scripts.benchmarks.workplace import ckptkit, floors, make, size_of, workplace
from scripts.markdown import paragraph

RANKS = 8
FAMILIES = {"torchtitan": "rows in pairs", "megatron": "q, k and v in one, gate and up in one"}


def names(size_gb: float, runs: int) -> None:
    """Measure consolidating a Llama under the names of other libraries, into the Hub's and as they are."""
    with workplace() as home:
        own = home / "own"
        make(RANKS, f"sharded --size-gb {size_gb} --dtype bfloat16", own)
        shapes = llama_of(size_gb * 1e9 / 2)
        (own / "config.json").write_text(json.dumps(config_of(shapes)))
        contenders = []
        for family in FAMILIES:
            place = home / family
            ckptkit("convert", own, place, "--to", "dcp", "--names", family, "--world-size", RANKS)
            contenders += [floors(family, place)[0], *ours(family, place)]
        results = measure(contenders, home / "out", runs=runs, modes=("warm",))
        size = size_of(own)
    folded = "; ".join(f"{family}: {how}" for family, how in FAMILIES.items())
    print(
        paragraph(
            f"""A Llama of {size} in bfloat16 from {RANKS} ranks, under other names ({folded}); medians of {runs} runs.
            No output is synced."""
        )
    )
    print(table(results))


def ours(family: str, src: Path) -> list[Contender]:
    """Return `ckptkit consolidate` with the Hub's names and with those that are there."""
    command, floor = "ckptkit consolidate {src} {out}/model --no-sync", f"{family}: cat"
    return [
        Contender(f"{family}: ckptkit consolidate", command, src, floor),
        Contender(f"{family}: ckptkit consolidate --names keep", f"{command} --names keep", src, floor),
    ]


def config_of(shapes: Shapes) -> dict[str, object]:
    """Return the config.json of a Llama with heads of 64."""
    vocabulary, hidden = shapes["lm_head.weight"]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": shapes["model.layers.0.mlp.up_proj.weight"][0],
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": shapes["model.layers.0.self_attn.k_proj.weight"][0] // 64,
        "num_hidden_layers": sum(name.endswith("mlp.up_proj.weight") for name in shapes),
        "vocab_size": vocabulary,
    }
