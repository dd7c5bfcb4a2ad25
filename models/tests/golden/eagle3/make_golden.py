"""Golden values and gradients of the EAGLE-3 unroll, written from its description alone.

Usage: python make_golden.py        (torch 2.13.0, safetensors 0.8.0)

Row t, step s reads the embedding of token t+1+s and the fused states of position t (s = 0; without `fc`
the target's final state of t after its final norm) or its own output of step s-1 (s > 0), at rotary position t+s; it sees the step-0 keys of rows 0..t and its own keys
of steps 1..s; its logits predict token t+2+s and are taught by the target's distribution at position
t+1+s. In terms of slots: anchor a = t+1, depth d = s.
"""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reference import *  # noqa: F403

K = 4


def normed_states(w, states):
    """What `fc` reads: the states of the taps, normed as one, each by itself, or not at all."""
    if "aux_norm" in w:
        return rms_norm(states, w["aux_norm"])
    if "aux_norms.0" in w:
        taps = [states[i * H : (i + 1) * H] for i in range(TAPS)]
        return torch.cat([rms_norm(tap, w[f"aux_norms.{i}"]) for i, tap in enumerate(taps)])
    return states


def row_outputs(w, document, frequencies, norm_before_residual, norm_output):
    """Normed outputs by slot (anchor t+1, depth s), wherever token t+1+s exists."""
    ids, aux, embedding = (document[name] for name in ("ids", "aux", "embedding"))
    step_zero_keys, step_zero_values = [], []
    outputs = {}
    for t in range(len(ids) - 1):
        if "fc" in w:
            hidden = w["fc"] @ normed_states(w, aux[t])
        else:  # the only state is the target's last one, after its final norm
            hidden = rms_norm(document["final_hidden"][t], document["final_norm"])
        keys, values = list(step_zero_keys), list(step_zero_values)
        for s in range(K):
            if t + 1 + s >= len(ids):
                break
            token = rms_norm(embedding[ids[t + 1 + s]], w["embed_norm"])
            normed = rms_norm(hidden, w["hidden_norm"])
            both = torch.cat([token, normed])
            q = rotate((w["q_proj"] @ both).reshape(HEADS, D), t + s, frequencies)
            k = rotate((w["k_proj"] @ both).reshape(KV_HEADS, D), t + s, frequencies)
            v = (w["v_proj"] @ both).reshape(KV_HEADS, D)
            keys.append(k)
            values.append(v)
            if s == 0:
                step_zero_keys.append(k)
                step_zero_values.append(v)
            residual = normed if norm_before_residual else hidden
            hidden = residual + w["o_proj"] @ attention(q, keys, values)
            hidden = hidden + gated_mlp(w, rms_norm(hidden, w["mlp_norm"]))
            outputs[t + 1, s] = rms_norm(hidden, w["norm"])
            if norm_output:
                hidden = outputs[t + 1, s]
    return outputs


def weights(generator, draft_vocab, aux_norm, fused):
    m, g = (lambda *size: matrix(generator, *size)), (lambda: gain(generator))
    w = dict(fc=m(H, TAPS * H)) if fused else {}
    w |= dict(
        embed_norm=g(), hidden_norm=g(),
        q_proj=m(HEADS * D, 2 * H), k_proj=m(KV_HEADS * D, 2 * H),
        v_proj=m(KV_HEADS * D, 2 * H), o_proj=m(H, HEADS * D), mlp_norm=g(),
        gate_proj=m(I, H), up_proj=m(I, H), down_proj=m(H, I), norm=g(),
        head=m(draft_vocab, H) * 2,
    )  # fmt: skip
    if aux_norm == "concatenated":
        w["aux_norm"] = gain(generator, TAPS * H)
    if aux_norm == "each":
        w |= {f"aux_norms.{i}": g() for i in range(TAPS)}
    return w


def make(name, seed, norm_before_residual, llama3, keep, aux_norm="none", norm_output=False, fused=True):
    frequencies = inverse_frequencies(llama3)
    make_case(
        HERE / f"{name}.safetensors",
        seed,
        lambda generator, draft_vocab: weights(generator, draft_vocab, aux_norm, fused),
        lambda w, document: row_outputs(w, document, frequencies, norm_before_residual, norm_output),
        keep,
        K,
    )


if __name__ == "__main__":
    make("plain", 1, norm_before_residual=False, llama3=False, keep=KEEP)
    make("normed_residual", 2, norm_before_residual=True, llama3=False, keep=KEEP)
    make("llama3_full_vocab", 3, norm_before_residual=False, llama3=True, keep=list(range(V)))
    both = dict(norm_before_residual=True, norm_output=True)
    make("normed_states", 4, llama3=False, keep=KEEP, aux_norm="concatenated", **both)
    make("final_state", 5, norm_before_residual=False, llama3=False, keep=KEEP, fused=False)
    published = dict(norm_before_residual=False, norm_output=True)  # EAGLE-3.1
    make("each_state_normed", 6, llama3=False, keep=KEEP, aux_norm="each", **published)
