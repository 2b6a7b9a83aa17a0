"""Faults of a resume, each planted into a right script by a change of one statement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FSDP2, NUMPY = (Path(__file__).with_name(name) for name in ("train_fsdp2.py", "train_numpy.py"))


@dataclass(frozen=True)
class Fault:
    """A statement of the right script and its replacement; what the proof has to name. `without` is deleted, too."""

    old: str
    new: str
    named: str
    without: str = ""
    script: Path = FSDP2

    def plant(self, path: Path) -> Path:
        """Write the script with the fault."""
        text = self.script.read_text()
        assert text.count(self.old) == 1, self.old
        assert self.without in text, self.without
        text = text.replace(self.old, self.new)
        path.write_text(text.replace(self.without, "pass") if self.without else text)
        return path


_LOAD = """dcp.load(state, checkpoint_id=args.resume)
        set_model_state_dict(model, state["model"])"""
_LOAD_LESS = """dcp.load(state, checkpoint_id=args.resume, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))"""
_OPTIMIZER = 'set_optimizer_state_dict(model, optimizer, state["optim"])'
_ANEW = """optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))"""
_SWAPPED = f"""{_OPTIMIZER}
        first, *_, last = (layer.weight for layer in model)
        optimizer.state[first], optimizer.state[last] = optimizer.state[last], optimizer.state[first]"""
_RESET = f"""{_OPTIMIZER}
        optimizer.param_groups[0]["lr"] = LR"""

FAULTS = {
    "weights not loaded because of a prefix and strict=False": Fault(
        _LOAD,
        'state["model"] = {f"module.{name}": tensor for name, tensor in state["model"].items()}\n        ' + _LOAD_LESS,
        "weights in the checkpoint not restored",
    ),
    "one layer's weights not loaded": Fault(
        _LOAD, f'state["model"].pop("1.weight")\n        {_LOAD_LESS}', "weight `model.1.weight`"
    ),
    "optimizer made anew after its state was loaded": Fault(_OPTIMIZER, f"{_OPTIMIZER}\n        {_ANEW}", "moments"),
    "moments loaded by number in another order": Fault(_OPTIMIZER, _SWAPPED, "optimizer's `optim.state"),
    "learning rate of the groups reset": Fault(_OPTIMIZER, _RESET, "optimizer options"),
    "scheduler not saved": Fault(
        '            "scheduler": scheduler.state_dict(),\n',
        "",
        "scheduler",
        'scheduler.load_state_dict(state["scheduler"])',
    ),
    "scheduler saved and not loaded": Fault('scheduler.load_state_dict(state["scheduler"])', "pass", "scheduler"),
    "step off by one": Fault('step = state["step"]', 'step = state["step"] - 1', "step: the resumed run took another"),
    "random state not restored": Fault('torch.set_rng_state(state["rng"])', "pass", "random state"),
    "data from the beginning": Fault('data.load(state["data"])', "pass", "data position"),
    "set_epoch forgotten after a resume": Fault(
        'self.set_epoch(state["epoch"])', 'self.epoch = state["epoch"]', "data position"
    ),
    "EMA not saved": Fault('            "ema": ema,\n', "", "EMA"),
    "gradient scaler not saved": Fault(
        '            "scaler": {"scale": scaler.scale, "good": scaler.good},\n',
        "",
        "gradient scaler",
        'scaler.scale, scaler.good = state["scaler"]["scale"], state["scaler"]["good"]',
    ),
}


def in_numpy(old: str, new: str, named: str) -> Fault:
    return Fault(old, new, named, script=NUMPY)


IN_NUMPY = {
    "scheduler not loaded": in_numpy('scheduler = state["scheduler"]', "pass", "scheduler"),
    "weights not loaded": in_numpy('weights = load_file(saved[-1] / "model.safetensors")', "pass", "weights"),
    "moments not loaded": in_numpy('moments = load_file(saved[-1] / "optimizer.safetensors")', "pass", "moments"),
    "EMA not loaded": in_numpy('ema = load_file(saved[-1] / "ema.safetensors")', "pass", "EMA"),
    "optimizer step not loaded": in_numpy('taken = state["optimizer"]["state"]["step"]', "pass", "optimizer step"),
    "options not loaded": in_numpy('group = state["optimizer"]["param_groups"][0]', "pass", "optimizer options"),
    "data position not loaded": in_numpy('position = state["data"]', "pass", "data position"),
    "step not loaded": in_numpy('step = state["step"]', "pass", "step in the checkpoint not restored"),
    "random state not loaded": in_numpy('rng.bit_generator.state = state["rng"]', "pass", "random state"),
}
