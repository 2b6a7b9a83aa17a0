"""Measure how packed weights become plain: plan a trillion parameters, and convert some experts of one layer.

    python -m scripts.benchmarks.quantized DIR [EXPERTS]

DIR gets sparse files, and 88 MB of output for each expert; it is emptied at the end.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.benchmarks.trillion import EXPERTS, HIDDEN, INNER, LAYERS, write
from scripts.markdown import table


def quantized(home: Path, experts: int) -> None:
    """Print seconds, rates and peak memory."""
    root, out = home / "in", home / "out"
    write(root, filled=experts)
    plan = run(root, out, "--dry-run")
    done = run(root, out, *(word for number in range(experts) for word in ("--include", f"*.1.*.experts.{number}.*")))
    numbers = experts * 3 * HIDDEN * INNER
    rate = numbers / max(done["seconds"] - plan["seconds"], 1e-9)
    whole = (LAYERS - 1) * EXPERTS * 3 * HIDDEN * INNER
    rows = [
        ["", "weights", "parameters", "seconds", "peak memory"],
        ["planned", f"{(LAYERS - 1) * EXPERTS * 3:,}", f"{whole:,}", f"{plan['seconds']:.1f}", ""],
        ["converted", f"{experts * 3}", f"{numbers:,}", f"{done['seconds']:.1f}", f"{done['peak_rss_bytes']:,} B"],
    ]
    print(table(rows))
    print(f"\n{rate / 1e6:.0f} million parameters a second after planning; {whole / rate / 3600:.1f} h for all of them")


def run(root: Path, out: Path, *words: str) -> dict[str, Any]:
    """Return the report of one conversion."""
    command = [sys.executable, "-m", "ckptkit", "consolidate", str(root), str(out), "--dtype", "bf16", "--json", *words]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1]) / "quantized"
    try:
        quantized(place, int(sys.argv[2]) if len(sys.argv) > 2 else 16)
    finally:
        shutil.rmtree(place, ignore_errors=True)
