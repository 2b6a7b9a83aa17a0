"""Load a transformers model into a device, from an export or from shards, for `scripts/bench gpu`."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ckptkit.integrations.transformers import load


def main() -> None:
    """Load a model, look at each weight, and print the seconds of the load and the peak memory in MiB."""
    parser = argparse.ArgumentParser()
    parser.add_argument("src", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--device")
    options = parser.parse_args()
    torch.zeros(1, device=options.device)  # the start of CUDA is no part of the load
    began = time.perf_counter()
    if options.base:
        model = load(options.src, base=options.base, dtype="bfloat16", device_map=options.device)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.src, dtype="bfloat16", device_map=options.device)
    total = sum(float(parameter.abs().max()) for parameter in model.parameters())  # what is mapped is read now
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak": peak, "total": total}))


if __name__ == "__main__":
    main()
