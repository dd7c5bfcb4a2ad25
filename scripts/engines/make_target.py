"""Write a tiny random target in f32: the fixture of the engine checks.

    make_target.py OUT [--rope-scaling llama3] [--tied] [--qwen3]

Eight layers, width 256, four query heads sharing two key-value heads of size 64 (engines on a CPU want
a usual head size), 512 tokens. Norm gains are moved away from one, so that a missing or swapped norm
shows. No tokenizer: prompts are token ids.

Environment: README.md in this folder. Checked with torch 2.13.0 and transformers 5.19.0.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def build(arguments: argparse.Namespace) -> torch.nn.Module:
    settings = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": arguments.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if arguments.rope_scaling == "llama3":
        settings["rope_parameters"] = LLAMA3
    torch.manual_seed(arguments.seed)
    if arguments.qwen3:
        return Qwen3ForCausalLM(Qwen3Config(**settings))
    return LlamaForCausalLM(LlamaConfig(**settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--rope-scaling", choices=["default", "llama3"], default="default")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--qwen3", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = build(arguments).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                # The library's start (0.02) would leave the residual almost equal to the embedding.
                parameter.normal_(0.0, 0.06)
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
