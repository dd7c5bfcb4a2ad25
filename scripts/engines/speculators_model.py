"""The speculators package's EAGLE-3 as a function from states and tokens to logits of every step."""

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig


def load(folder: str) -> torch.nn.Module:
    """The model in float32, with the composed attention that runs on a CPU."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def logits_of_steps(
    model: torch.nn.Module, aux: torch.Tensor, shifted: torch.Tensor, steps: int
) -> list[torch.Tensor]:
    """Runs the package's training forward; one `[S, V_draft]` a step.

    `aux` is `[S, K*H]`, `shifted` `[S]` holds the token after each position.
    """
    recorded: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(
        lambda _module, _inputs, output: recorded.append(output[0].detach().clone())
    )
    length = aux.shape[0]
    with torch.no_grad():
        model(
            hidden_states=aux[None],
            input_ids=shifted[None],
            document_ids=torch.zeros(1, length, dtype=torch.long),
            position_ids=torch.arange(length)[None],
            ttt_steps=steps,
        )
    hook.remove()
    return recorded
