"""Run vLLM in a process of its own, of an environment that has it: `vllm_engine.py JSON`; the last line is the tokens.

The JSON has the options of `vllm.LLM`, and `reload`: the paths of checkpoints to load one after another. `updates` are
deltas to apply one after another, or lists of them; one that is refused prints `refused: ` and the error. On a CPU vLLM
packs weights, so that nothing can patch them, unless `plain_kernels` is true. Either puts the engine in this process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    asked = json.loads(sys.argv[1])
    plain = asked.pop("plain_kernels", False)
    if plain or "updates" in asked:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, TokensPrompt

    paths, updates = asked.pop("reload", []), asked.pop("updates", [])
    if plain:
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
    engine = LLM(
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="float32", enable_prefix_caching=False,
        **asked,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=[1, 2, 3, 4]), TokensPrompt(prompt_token_ids=[9, 8, 7])]
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)

    def generate() -> list[list[int]]:
        return [list(found.outputs[0].token_ids) for found in engine.generate(prompts, sampling, use_tqdm=False)]

    tokens = [generate()]
    for path in paths:
        engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        tokens.append(generate())
    for path in updates:
        update(engine, path)
        tokens.append(generate())
    sys.stdout.write(f"{json.dumps(tokens)}\n")


def update(engine: Any, path: str | list[str]) -> None:
    try:
        engine.init_weight_transfer_engine({"init_info": {}})
        engine.start_weight_update()
        engine.update_weights({"update_info": {"path": path}})
        engine.finish_weight_update()
    except Exception as error:  # noqa: BLE001 - of any process of vLLM's
        sys.stdout.write(f"refused: {error}\n")


if __name__ == "__main__":
    main()
