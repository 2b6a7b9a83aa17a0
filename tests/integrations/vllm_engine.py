"""Run vLLM in a process of its own, of an environment that has it: `vllm_engine.py JSON`; the last line is the tokens.

The JSON has the options of `vllm.LLM`, and `reload`: the paths of checkpoints to load one after another.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    asked = json.loads(sys.argv[1])
    paths = asked.pop("reload", [])
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
    sys.stdout.write(f"{json.dumps(tokens)}\n")


if __name__ == "__main__":
    main()
