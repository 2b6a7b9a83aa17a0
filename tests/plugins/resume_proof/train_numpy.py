"""A right training loop that starts in a tenth of a second: Adam in numpy, saved as safetensors and JSON.

It resumes by itself from the highest step in its run directory, and writes its losses as lines of JSON.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

BATCH, BATCHES, WIDTH, LR = 4, 3, 8, 0.02


def main(run: Path, steps: int, save_every: int) -> None:
    samples = np.random.default_rng(7).standard_normal((BATCH * BATCHES, WIDTH)).astype(np.float32)
    rng = np.random.default_rng(0)
    weights = {f"layers.{i}.weight": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.3 for i in range(2)}
    moments = {f"{name}.{kind}": np.zeros_like(weights[name]) for name in weights for kind in ("exp_avg", "exp_avg_sq")}
    ema = {name: weight.copy() for name, weight in weights.items()}
    group: dict[str, Any] = {"lr": LR, "betas": [0.9, 0.999]}
    scheduler: dict[str, Any] = {"base_lrs": [LR], "last_epoch": 0}
    position = {"epoch": 0, "batch": 0}
    taken, step = 0, 0

    saved = sorted(run.glob("step_*"), key=lambda path: int(path.name[5:]))
    if saved:
        weights = load_file(saved[-1] / "model.safetensors")
        moments = load_file(saved[-1] / "optimizer.safetensors")
        ema = load_file(saved[-1] / "ema.safetensors")
        state = json.loads((saved[-1] / "state.json").read_text())
        group = state["optimizer"]["param_groups"][0]
        taken = state["optimizer"]["state"]["step"]
        scheduler = state["scheduler"]
        position = state["data"]
        step = state["step"]
        rng.bit_generator.state = state["rng"]

    while step < steps:
        if position["batch"] == BATCHES:
            position = {"epoch": position["epoch"] + 1, "batch": 0}
        order = np.random.default_rng(position["epoch"]).permutation(len(samples))
        batch = samples[order[position["batch"] * BATCH :][:BATCH]] * (rng.random((BATCH, WIDTH)) > 0.1)
        position["batch"] += 1
        first, second = weights.values()
        hidden = batch @ first
        error = hidden @ second - batch[:, ::-1]
        gradients = [batch.T @ (error @ second.T), hidden.T @ error]
        taken, step = taken + 1, step + 1
        for name, gradient in zip(weights, gradients, strict=True):
            for kind, beta, value in zip(
                ("exp_avg", "exp_avg_sq"), group["betas"], (gradient, gradient**2), strict=True
            ):
                moments[f"{name}.{kind}"] = (beta * moments[f"{name}.{kind}"] + (1 - beta) * value).astype(np.float32)
            mean, square = (
                moments[f"{name}.{kind}"] / (1 - beta**taken)
                for kind, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
            )
            weights[name] = (weights[name] - group["lr"] * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
            ema[name] = (0.9 * ema[name] + 0.1 * weights[name]).astype(np.float32)
        scheduler["last_epoch"] += 1
        group["lr"] = scheduler["base_lrs"][0] / (1 + 0.3 * scheduler["last_epoch"])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": float((error**2).mean())}) + "\n")
        if step % save_every == 0:
            state = {
                "optimizer": {"state": {"step": taken}, "param_groups": [group]},
                "scheduler": scheduler,
                "data": position,
                "step": step,
                "rng": rng.bit_generator.state,
            }
            hidden_place = run / f".saving-{step}"
            hidden_place.mkdir(exist_ok=True)
            save_file(weights, hidden_place / "model.safetensors")
            save_file(moments, hidden_place / "optimizer.safetensors")
            save_file(ema, hidden_place / "ema.safetensors")
            (hidden_place / "state.json").write_text(json.dumps(state))
            shutil.rmtree(run / f"step_{step}", ignore_errors=True)
            hidden_place.rename(run / f"step_{step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
