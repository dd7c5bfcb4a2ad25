"""Writes tiny random targets with their logits and captured states, computed by transformers in f32.

Usage: python make_golden.py        (torch 2.13.0, transformers 5.19.0, safetensors 0.8.0)

Each case folder holds `config.json` and `model.safetensors` as transformers writes them, and
`expected.safetensors`: the sequences, their logits and the output of every decoder layer, taken by a
forward hook on the layer (so before the final norm, also for the last one). Every sequence runs alone.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
PLAIN = dict(rope_type="default", rope_theta=500000.0)
LINEAR = dict(rope_type="linear", rope_theta=500000.0, factor=4.0)
COMMON = dict(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=1024,
    bos_token_id=256,
    eos_token_id=258,
    pad_token_id=259,
    hidden_act="silu",
)


def randomise(model, seed):
    """Matrices N(0, 1/in), norm gains uniform in 0.5..3, biases N(0, 0.3^2).

    Query and key matrices are smaller, so that attention scores are of order one: with scores near 100
    the f32 run of transformers itself is off by 6e-5 from an f64 run.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            value = 0.5 + 2.5 * torch.rand(parameter.shape, generator=generator)
        elif parameter.ndim == 1:
            value = 0.3 * torch.randn(parameter.shape, generator=generator)
        else:
            value = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
        if "embed_tokens" in name:
            value = value * 4
        if "q_proj.weight" in name or "k_proj.weight" in name:
            value = value * 0.3
        parameter.data.copy_(value)


def sequences(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 320, (1, length), generator=generator) for length in lengths]


@torch.no_grad()
def expected(model, rows, keep):
    """Logits and layer outputs of the last `keep` positions of each row."""
    out = {}
    for index, ids in enumerate(rows):
        captured = []
        hooks = [
            layer.register_forward_hook(
                lambda _m, _i, o: captured.append(o[0] if isinstance(o, tuple) else o)
            )
            for layer in model.model.layers
        ]
        logits = model(ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        states = torch.stack([c.reshape(1, -1, 16)[0] for c in captured])  # [N, S, H]
        out[f"ids.{index}"] = ids[0].to(torch.int64)
        out[f"logits.{index}"] = logits[0, -keep:].contiguous()
        out[f"states.{index}"] = states[:, -keep:].contiguous()
    return out


def write(name, model, rows, keep=1000, dtype=torch.float32):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = model.to(dtype)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(expected(model.to(torch.float32).eval(), rows, keep), folder / "expected.safetensors")


def llama(seed, **changes):
    config = LlamaConfig(**(COMMON | dict(num_hidden_layers=3, tie_word_embeddings=False, rope_parameters=PLAIN) | changes))
    model = LlamaForCausalLM(config)
    randomise(model, seed)
    return model


def qwen(kind, seed):
    config_type, model_type = dict(
        qwen2=(Qwen2Config, Qwen2ForCausalLM), qwen3=(Qwen3Config, Qwen3ForCausalLM)
    )[kind]
    config = config_type(**(COMMON | dict(num_hidden_layers=3, tie_word_embeddings=False, rope_parameters=PLAIN, head_dim=4)))
    model = model_type(config)
    randomise(model, seed)
    return model


def write_rope_angles():
    """Cosine and sine of every frequency at a few positions, `[4, D/2]` each, for head size 64."""
    positions = torch.tensor([[0, 50, 100, 900]])
    out = {}
    for name, parameters in dict(default=PLAIN, linear=LINEAR, llama3=LLAMA3).items():
        config = LlamaConfig(**(COMMON | dict(head_dim=64, rope_parameters=parameters)))
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        out[f"{name}.cos"] = cos[0, :, :32].contiguous()
        out[f"{name}.sin"] = sin[0, :, :32].contiguous()
    save_file(out, HERE / "rope_angles.safetensors")


rows = sequences([12, 7, 1], 1)
write("base", llama(10, num_hidden_layers=8), rows)
write("tied", llama(11, tie_word_embeddings=True), rows)
write("llama3", llama(12, rope_parameters=LLAMA3), sequences([901, 130], 2), keep=4)
write("head_dim", llama(13, head_dim=8), rows)
write("qwen2", qwen("qwen2", 14), rows)
write("qwen3", qwen("qwen3", 15), rows)
write("bf16", llama(16), rows, dtype=torch.bfloat16)
write_rope_angles()
