"""Measure loading shards into a transformers model, beside its consolidated form. Imports no torch."""

from __future__ import annotations

from scripts.benchmarks.merge import save
from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.workplace import ckptkit, size_of, workplace
from scripts.markdown import paragraph

RANKS = 8
_DTYPES = ("bfloat16", "float32")  # that of the checkpoint, and another
_USE = "print(sum(p.abs().max().item() for p in model.parameters()))"  # a mapped tensor counts once it is used
_LOAD = """python -c '
from ckptkit.integrations.transformers import load
model = load("{{src}}", dtype="{dtype}", base="{base}")
{use}
'"""
_FROM_PRETRAINED = """python -c '
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{root}", dtype="{dtype}")
{use}
'"""


def serve(size_gb: float, runs: int) -> None:
    """Measure `integrations.transformers.load` of shards beside `consolidate` and `from_pretrained`."""
    with workplace() as home:
        save(home, size_gb)
        base, shards = home / "base", home / "shards"
        ckptkit("convert", base, shards, "--to", "dcp", "--world-size", str(RANKS))
        contenders = []
        for dtype in _DTYPES:
            floor = f"{dtype}: from_pretrained of the export"
            both = f"ckptkit consolidate {{src}} {{out}}/hf --base {base} && "
            theirs = _FROM_PRETRAINED.format(root=base, dtype=dtype, use=_USE)
            exported = both + _FROM_PRETRAINED.format(root="{out}/hf", dtype=dtype, use=_USE)
            ours = _LOAD.format(dtype=dtype, base=base, use=_USE)
            contenders += [
                Contender(floor, theirs, base, floor, only_reads=True),
                Contender(f"{dtype}: consolidate, then from_pretrained", exported, shards, floor),
                Contender(f"{dtype}: load of the shards", ours, shards, floor, only_reads=True),
            ]
        results = measure(contenders, home / "out", runs=runs, modes=("warm",))
        size = size_of(base)
    print(
        paragraph(
            f"""A llama of {size} in bfloat16, saved by {RANKS} ranks; every weight is used once after the load. Medians
            of {runs} runs. The reference is `from_pretrained` of the finished export. Peak RSS includes mapped
            files."""
        )
    )
    print(table(results))
