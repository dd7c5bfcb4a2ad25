"""Golden values and gradients of the recursive MTP head, written from its description alone.

Usage: python make_golden.py        (torch 2.13.0, safetensors 0.8.0)

Row t, step s reads the embedding of token t+1+s (zeros in place of it where t+s = 0, if asked for) and
the target's final state of t after the final norm (s = 0) or its own output of step s-1. Both are normed,
joined in either order and projected: the input of one decoder block of the target's shape at rotary
position t+s, which sees the step-0 keys of rows 0..t and its own keys of steps 1..s. Its output after the
head's own norm goes into the head and into step s+1. Anchor a = t+1, depth d = s.
"""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reference import *  # noqa: F403

K = 3


def row_outputs(w, document, hidden_first, zero_first):
    ids, embedding = document["ids"], document["embedding"]
    frequencies = inverse_frequencies()
    step_zero, outputs = [], {}
    for t in range(len(ids) - 1):
        recurrent = rms_norm(document["final_hidden"][t], document["final_norm"])
        seen = list(step_zero)
        for s in range(K):
            if t + 1 + s >= len(ids):
                break
            token = embedding[ids[t + 1 + s]]
            if zero_first and t + s == 0:
                token = torch.zeros_like(token)
            token = rms_norm(token, w["embed_norm"])
            state = rms_norm(recurrent, w["hidden_norm"])
            hidden = w["input_proj"] @ torch.cat([state, token] if hidden_first else [token, state])
            x = rms_norm(hidden, w["layer.input_norm"])
            q, k, v = (w[f"layer.{n}_proj"] @ x + w.get(f"layer.{n}_bias", 0) for n in "qkv")
            q, k, v = q.reshape(HEADS, D), k.reshape(KV_HEADS, D), v.reshape(KV_HEADS, D)
            if "layer.q_norm" in w:
                q, k = head_norm(q, w["layer.q_norm"]), head_norm(k, w["layer.k_norm"])
            q, k = rotate(q, t + s, frequencies), rotate(k, t + s, frequencies)
            seen.append((k, v))
            if s == 0:
                step_zero.append(seen[-1])
            mixed = attention(q, [k for k, _ in seen], [v for _, v in seen])
            hidden = hidden + w["layer.o_proj"] @ mixed
            hidden = hidden + gated_mlp(w, rms_norm(hidden, w["layer.mlp_norm"]), "layer.")
            recurrent = rms_norm(hidden, w["norm"])
            outputs[t + 1, s] = recurrent
    return outputs


def weights(generator, draft_vocab, qk_norm, qkv_bias):
    m, g = (lambda *size: matrix(generator, *size)), (lambda *size: gain(generator, *size))
    w = dict(embed_norm=g(), hidden_norm=g(), input_proj=m(H, 2 * H), norm=g(), head=m(draft_vocab, H) * 2)
    layer = dict(
        input_norm=g(), q_proj=m(HEADS * D, H), k_proj=m(KV_HEADS * D, H), v_proj=m(KV_HEADS * D, H),
        o_proj=m(H, HEADS * D), mlp_norm=g(), gate_proj=m(I, H), up_proj=m(I, H), down_proj=m(H, I),
    )  # fmt: skip
    if qk_norm:
        layer |= dict(q_norm=g(D), k_norm=g(D))
    if qkv_bias:
        b = lambda width: draw(generator, width, scale=0.5)
        layer |= dict(q_bias=b(HEADS * D), k_bias=b(KV_HEADS * D), v_bias=b(KV_HEADS * D))
    return w | {f"layer.{name}": value for name, value in layer.items()}


def make(name, seed, hidden_first, zero_first, keep, qk_norm=False, qkv_bias=False):
    make_case(
        HERE / f"{name}.safetensors",
        seed,
        lambda generator, draft_vocab: weights(generator, draft_vocab, qk_norm, qkv_bias),
        lambda w, document: row_outputs(w, document, hidden_first, zero_first),
        keep,
        K,
    )


if __name__ == "__main__":
    make("hidden_first", 21, hidden_first=True, zero_first=True, keep=KEEP)
    make("embedding_first", 22, hidden_first=False, zero_first=False, keep=list(range(V)), qk_norm=True)
    make("biases", 23, hidden_first=True, zero_first=True, keep=KEEP, qkv_bias=True)
