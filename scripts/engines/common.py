"""Shared by the engine checks: result files of our examples, the transformers target, verdicts."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

BAR = 1e-4
"""Largest accepted absolute difference in float32; logits reach about 10, states about 100."""


def our_result(path: str) -> dict[str, torch.Tensor]:
    """A file written by `chain_logits` or `unroll_logits`."""
    return load_file(path)


def captured_states(target: str, ids: list[int], layer_ids: list[int]) -> torch.Tensor:
    """Outputs of the given blocks in transformers, concatenated: `[S, K*H]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    states = {}

    def keep(index):
        def hook(_module, _inputs, output):
            states[index] = output[0] if isinstance(output, tuple) else output

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(index))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return torch.cat([states[index][0] for index in layer_ids], dim=-1)


def greedy_tokens(target: str, ids: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers, without a cache and without a drafter."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    ids = list(ids)
    start = len(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        sys.exit(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    return float((a.double() - b.double()).abs().max())


def config_of(folder: str) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


def verdict(name: str, checks: dict[str, float | bool], notes: dict) -> None:
    """Prints one line of JSON; exits with 1 when a figure is not below its bar or a flag is false."""
    bars = {key: notes.get("bars", {}).get(key, BAR) for key in checks}
    passed = all(
        value if isinstance(value, bool) else value < bars[key] for key, value in checks.items()
    )
    print(json.dumps({"check": name, "passed": passed, **checks, **notes}), flush=True)
    sys.exit(0 if passed else 1)
