"""Compares our target forward pass with transformers on real text, both in f32.

Usage: python scripts/check_smollm2.py MODEL_FOLDER ROWS.ids.jsonl [--rows 8] [--program PATH]

Needs torch, transformers and safetensors. ROWS holds `prompt_ids` and `answer_ids` a line. The bounds
are those of the design: logits within 3e-4 absolute, every captured state within 5e-6 of the largest
magnitude of its row (a document). Our side runs all rows as one padded batch, transformers one row at
a time. `--exact` also measures both sides against a plain f64 forward pass, position by position: there
transformers in f32 is itself off by up to 1.4e-5 of the largest magnitude of the position.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CARGO = "cargo run --release -q -p draftsmith-models --example target_states --".split()


def read_rows(path, count):
    rows = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            rows.append(row["prompt_ids"] + row["answer_ids"])
            if len(rows) == count:
                break
    return rows


def run_ours(program, folder, rows, layers):
    with tempfile.TemporaryDirectory() as scratch:
        request, out = Path(scratch) / "request.json", Path(scratch) / "out.safetensors"
        request.write_text(json.dumps({"rows": rows, "layers": layers}), encoding="utf-8")
        subprocess.run([*program, folder, request, out], check=True)
        return load_file(out)


@torch.no_grad()
def run_theirs(model, ids, layers):
    captured = {}

    def keep(index):
        def hook(_module, _inputs, output):
            captured[index] = (output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1)

        return hook

    hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    last = len(model.model.layers) - 1
    return logits, [captured[i] for i in [*layers, last]]


def rms_norm(x, gain, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


@torch.no_grad()
def run_exactly(model, ids, layers):
    """The Llama forward pass in f64, for plain rope; logits and states as `run_theirs`."""
    w = {name: value.double() for name, value in model.state_dict().items()}
    config, length = model.config, len(ids)
    heads, eps = config.num_attention_heads, config.rms_norm_eps
    size = config.hidden_size // heads
    group = heads // config.num_key_value_heads
    base = config.rope_parameters["rope_theta"]
    angle = torch.arange(length).double()[:, None] * base ** (-torch.arange(0, size, 2).double() / size)
    cos, sin = angle.cos(), angle.sin()
    hidden_keys = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)

    def rotate(x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    h, captured = w["model.embed_tokens.weight"][ids], []
    for layer in range(config.num_hidden_layers):
        part = lambda name: w[f"model.layers.{layer}.{name}.weight"]
        split = lambda x, name: (x @ part(f"self_attn.{name}_proj").T).reshape(length, -1, size).transpose(0, 1)
        x = rms_norm(h, part("input_layernorm"), eps)
        q, k, v = rotate(split(x, "q")), rotate(split(x, "k")), split(x, "v")
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(hidden_keys, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        h = h + mixed @ part("self_attn.o_proj").T
        x = rms_norm(h, part("post_attention_layernorm"), eps)
        gate = x @ part("mlp.gate_proj").T
        h = h + (gate * torch.sigmoid(gate) * (x @ part("mlp.up_proj").T)) @ part("mlp.down_proj").T
        if layer in layers or layer == config.num_hidden_layers - 1:
            captured.append(h)
    return rms_norm(h, w["model.norm.weight"], eps) @ w["lm_head.weight"].T, captured


def by_position(found, wanted):
    return ((found - wanted).abs().amax(1) / wanted.abs().amax(1)).max().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("rows_file")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--program", help="a built target_states; the default asks cargo")
    parser.add_argument("--exact", action="store_true", help="also compare both with f64")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    depth = len(model.model.layers)
    layers = [1, depth // 2 - 1, depth - 4]
    rows = read_rows(arguments.rows_file, arguments.rows)
    program = [arguments.program] if arguments.program else CARGO
    ours = run_ours(program, arguments.folder, rows, layers)
    worst_logit, same_argmax, positions, largest = 0.0, 0, 0, 0.0
    state, state_by_position = [0.0] * 4, [0.0] * 4
    exact = {"ours": [0.0] * 5, "transformers": [0.0] * 5}
    for index, ids in enumerate(rows):
        logits, states = run_theirs(model, ids, layers)
        mine, my_states = ours[f"logits.{index}"], ours[f"states.{index}"].chunk(4, 1)
        worst_logit = max(worst_logit, (mine - logits).abs().max().item())
        same_argmax += (mine.argmax(1) == logits.argmax(1)).sum().item()
        positions += len(ids)
        for place, (found, wanted) in enumerate(zip(my_states, states)):
            scale = wanted.abs().max().item()
            largest = max(largest, scale)
            state[place] = max(state[place], (found - wanted).abs().max().item() / scale)
            state_by_position[place] = max(state_by_position[place], by_position(found, wanted))
        if arguments.exact:
            true_logits, true_states = run_exactly(model, ids, layers)
            for name, side in dict(ours=(mine, my_states), transformers=(logits, states)).items():
                figures = [by_position(x, y) for x, y in zip(side[1], true_states)]
                figures.append((side[0] - true_logits).abs().max().item())
                exact[name] = [max(pair) for pair in zip(exact[name], figures)]
    print(f"{len(rows)} rows, {positions} positions, largest state {largest:.0f}")
    print(f"logits: max abs difference {worst_logit:.2e} (bound 3e-4), argmax equal at {same_argmax}")
    for layer, row, position in zip([*layers, depth - 1], state, state_by_position):
        print(
            f"output of block {layer}: max difference {row:.2e} of the row's largest (bound 5e-6), "
            f"{position:.2e} of the position's"
        )
    for name, (*states, logits) in exact.items() if arguments.exact else ():
        shown = ", ".join(f"{value:.2e}" for value in states)
        print(f"{name} against f64: logits {logits:.2e}; states by position {shown}")
    return int(worst_logit > 3e-4 or max(state) > 5e-6)


if __name__ == "__main__":
    sys.exit(main())
