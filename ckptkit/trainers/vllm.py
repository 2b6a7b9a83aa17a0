"""Know the files that vLLM saves for itself, which are no source of a model.

Source: vllm/model_executor/model_loader/sharded_state_loader.py: `model-rank-R-part-P.safetensors` has what a rank of
the engine holds, under its own names of fused tensors, after they were processed. Nothing says how ranks share them.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Trainer

_FILE = r"model-rank-[0-9]+-part-[0-9]+\.safetensors"

VLLM = Trainer(
    name="vllm",
    unread={_FILE: "a sharded_state of vLLM, in which nothing says how its ranks share a tensor"},
    hints={_FILE: "take the model that it was made of"},
)
