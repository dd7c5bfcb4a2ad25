"""Golden values and gradients of the EAGLE-3 unroll, written from its description alone.

Usage: python make_golden.py        (torch 2.13.0, safetensors 0.8.0)

Nothing is vectorised on purpose: one Python loop over rows and steps, one attention over an explicit
list of visible keys, float64 throughout, gradients by torch autograd. Row t, step s reads the embedding
of token t+1+s and the fused states of position t (s = 0) or its own output of step s-1 (s > 0), at
rotary position t+s; it sees the step-0 keys of rows 0..t and its own keys of steps 1..s; its logits
predict token t+2+s and are taught by the target's distribution at position t+1+s. In terms of slots:
anchor a = t+1, depth d = s.

The losses, per slot, with teacher p (softmax over the whole vocabulary, then cut to the draft
vocabulary), p' = p / sum(p), drafter q, both at temperature T, alpha = sum(min(p, q)):
kl = sum(p' log(p'/q)), tv = 1 - alpha, lk_hybrid = l kl + (1-l) tv with l = exp(-3 alpha) detached,
ce = -log q(data token), or 0 when that token is no draft token, ce_argmax = -log q(argmax p).
The loss of a batch is sum(weight x loss) / sum(weight).
"""

from math import pi, sqrt
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
F64 = torch.float64
H, HEADS, KV_HEADS, D, I, V, TAPS, K = 16, 4, 2, 8, 24, 48, 3, 4
EPS = 1e-5
LENGTHS = [14, 9]
TURNS = [
    [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 0],  # two turns, the second too short for all depths
    [0, 1, 1, 1, 2, 2, 2, 2, 2],  # two turns that touch; the last one reaches the end of the row
]
KEEP = [0, 1, 2, 5, 7, 8, 11, 13, 17, 19, 20, 21, 26, 29, 30, 33, 34, 38, 40, 41, 44, 45, 46, 47]
LOSSES = {
    "kl": ({"kl": 1.0}, 1.0, 1.0),
    "tv": ({"tv": 1.0}, 1.0, 1.0),
    "lk_hybrid": ({"lk_hybrid": 1.0}, 1.0, 1.0),
    "ce": ({"ce": 1.0}, 1.0, 1.0),
    "ce_argmax": ({"ce_argmax": 1.0}, 1.0, 1.0),
    "mixture": ({"ce": 0.1, "tv": 0.9}, 0.7, 0.8),  # temperature 0.7, weights 0.8^d
}


def rms_norm(x, gain):
    return x / torch.sqrt((x * x).mean() + EPS) * gain


def inverse_frequencies(llama3):
    """Base 10000; llama3 scaling with factor 8, low 1, high 4, original length 8."""
    out = []
    for i in range(D // 2):
        w = 10000.0 ** (-2.0 * i / D)
        if llama3:
            wavelength = 2 * pi / w
            if wavelength > 8 / 1.0:
                w = w / 8
            elif wavelength >= 8 / 4.0:
                smooth = (8 / wavelength - 1.0) / (4.0 - 1.0)
                w = (1 - smooth) * w / 8 + smooth * w
        out.append(w)
    return torch.tensor(out, dtype=F64)


def rotate(x, position, frequencies):
    """Half rotation of the heads `[n, D]`."""
    angle = position * frequencies
    first, second = x[:, : D // 2], x[:, D // 2 :]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


def attention(q, keys, values):
    """`q` `[HEADS, D]`; a list of `[KV_HEADS, D]`; query head h reads key-value head h / group."""
    out = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = torch.stack([(q[head] * key[kv]).sum() / sqrt(D) for key in keys])
        weights = torch.softmax(scores, 0)
        out.append(sum(w * value[kv] for w, value in zip(weights, values)))
    return torch.cat(out)


def row_outputs(w, ids, aux, embedding, frequencies, norm_before_residual, norm_output):
    """Normed outputs by (row t, step s) of one document, wherever token t+1+s exists."""
    step_zero_keys, step_zero_values = [], []
    outputs = {}
    for t in range(len(ids) - 1):
        states = rms_norm(aux[t], w["aux_norm"]) if "aux_norm" in w else aux[t]
        hidden = w["fc"] @ states
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
            x = rms_norm(hidden, w["mlp_norm"])
            gate = w["gate_proj"] @ x
            hidden = hidden + w["down_proj"] @ (gate * torch.sigmoid(gate) * (w["up_proj"] @ x))
            outputs[t, s] = rms_norm(hidden, w["norm"])
            if norm_output:
                hidden = outputs[t, s]
    return outputs


def valid_slots(turns):
    """(anchor, depth) whose tokens anchor .. anchor+1+depth lie in one turn; anchor at least 1."""
    return [
        (a, d)
        for a in range(1, len(turns))
        for d in range(K)
        if a + 1 + d < len(turns) and turns[a] and len(set(turns[a : a + 2 + d])) == 1
    ]


def slot_loss(losses, draft_logits, teacher_logits, token, keep, temperature):
    log_p = torch.log_softmax(teacher_logits / temperature, 0)[keep]
    log_q = torch.log_softmax(draft_logits / temperature, 0)
    p, q = log_p.exp(), log_q.exp()
    renormalised = p / p.sum()
    alpha = torch.minimum(p, q).sum()
    kl = (renormalised * (renormalised.log() - log_q)).sum()
    mix = torch.exp(-3 * alpha.detach())
    value = {
        "kl": kl,
        "tv": 1 - alpha,
        "lk_hybrid": mix * kl + (1 - mix) * (1 - alpha),
        "ce": -log_q[keep.index(token)] if token in keep else torch.zeros((), dtype=F64),
        "ce_argmax": -log_q[int(p.argmax())],
    }
    return sum(c * value[name] for name, c in losses.items()), float(alpha.detach())


def draw(generator, *shape, scale=1.0):
    """Values that f32 holds exactly."""
    return (torch.randn(shape, generator=generator) * scale).to(F64)


def weights(generator, draft_vocab, aux_norm):
    matrix = lambda out, width: draw(generator, out, width, scale=width**-0.5)
    gain = lambda: (0.5 + torch.rand(H, generator=generator)).to(F64)
    w = dict(
        fc=matrix(H, TAPS * H), embed_norm=gain(), hidden_norm=gain(),
        q_proj=matrix(HEADS * D, 2 * H), k_proj=matrix(KV_HEADS * D, 2 * H),
        v_proj=matrix(KV_HEADS * D, 2 * H), o_proj=matrix(H, HEADS * D), mlp_norm=gain(),
        gate_proj=matrix(I, H), up_proj=matrix(I, H), down_proj=matrix(H, I), norm=gain(),
        head=matrix(draft_vocab, H) * 2,
    )  # fmt: skip
    if aux_norm:
        w["aux_norm"] = (0.5 + torch.rand(TAPS * H, generator=generator)).to(F64)
    return {name: value.to(torch.float32).to(F64).requires_grad_() for name, value in w.items()}


def make(name, seed, norm_before_residual, llama3, keep, aux_norm=False, norm_output=False):
    generator = torch.Generator().manual_seed(seed)
    w = weights(generator, len(keep), aux_norm)
    embedding, target_head = draw(generator, V, H), draw(generator, V, H, scale=0.5)
    final_norm = (0.5 + 2.5 * torch.rand(H, generator=generator)).to(F64)
    frequencies = inverse_frequencies(llama3)
    slots, logits, teacher, tokens = [], [], [], []
    saved = dict(embedding=embedding, target_head=target_head, final_norm=final_norm)
    for row, (length, turns) in enumerate(zip(LENGTHS, TURNS)):
        ids = torch.randint(0, V, (length,), generator=generator).tolist()
        aux = draw(generator, length, TAPS * H)
        final_hidden = draw(generator, length, H, scale=3.0)
        saved |= {f"ids.{row}": torch.tensor(ids), f"turns.{row}": torch.tensor(turns)}
        saved |= {f"aux.{row}": aux, f"final_hidden.{row}": final_hidden}
        outputs = row_outputs(
            w, ids, aux, embedding, frequencies, norm_before_residual, norm_output
        )
        for a, d in valid_slots(turns):
            slots.append([row, a, d])
            logits.append(w["head"] @ outputs[a - 1, d])
            teacher.append(target_head @ rms_norm(final_hidden[a + d], final_norm))
            tokens.append(ids[a + 1 + d])
    saved |= {f"weight.{n}": v for n, v in w.items()}
    saved |= {"slots": torch.tensor(slots), "logits": torch.stack(logits)}
    for loss_name, (losses, temperature, decay) in LOSSES.items():
        pairs = [
            slot_loss(losses, logits[i], teacher[i], tokens[i], keep, temperature)
            for i in range(len(slots))
        ]
        weight = [decay ** slot[2] for slot in slots]
        loss = sum(c * value for c, (value, _) in zip(weight, pairs)) / sum(weight)
        gradient = torch.autograd.grad(loss, list(w.values()), retain_graph=True)
        saved[f"{loss_name}.loss"] = loss.reshape(1)
        saved[f"{loss_name}.alpha"] = torch.tensor([alpha for _, alpha in pairs])
        saved |= {f"{loss_name}.grad.{n}": g for n, g in zip(w, gradient)}
    as_file = lambda v: v.detach().contiguous().to(torch.float32 if v.is_floating_point() else v.dtype)
    save_file({n: as_file(v) for n, v in saved.items()}, HERE / f"{name}.safetensors")
    inside = sum(token in keep for token in tokens)
    print(name, len(slots), "slots,", inside, "data tokens inside the draft vocabulary")


if __name__ == "__main__":
    make("plain", 1, norm_before_residual=False, llama3=False, keep=KEEP)
    make("normed_residual", 2, norm_before_residual=True, llama3=False, keep=KEEP)
    make("llama3_full_vocab", 3, norm_before_residual=False, llama3=True, keep=list(range(V)))
    make("normed_states", 4, norm_before_residual=True, llama3=False, keep=KEEP, aux_norm=True, norm_output=True)
