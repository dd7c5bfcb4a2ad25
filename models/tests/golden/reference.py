"""What the golden generators of all drafter families share, written from the descriptions alone.

Nothing is vectorised on purpose: norms, rotary positions and attention over an explicit list of visible
keys, one token at a time, float64 throughout, gradients by torch autograd (torch 2.13.0, safetensors
0.8.0). A family adds `outputs(weights, document)`: its normed output rows by slot (anchor, depth).

The losses, per slot, with teacher p (softmax over the whole vocabulary, then cut to the draft
vocabulary), p' = p / sum(p), drafter q, both at temperature T, alpha = sum(min(p, q)):
kl = sum(p' log(p'/q)), tv = 1 - alpha, lk_hybrid = l kl + (1-l) tv with l = exp(-3 alpha) detached,
ce = -log q(data token), or 0 when that token is no draft token, ce_argmax = -log q(argmax p),
reverse_kl = sum(q log(q/p')), jsd = (sum(p' log(p'/m)) + sum(q log(q/m))) / 2 with m = (p'+q)/2,
renyi_half = -2 log(sum(sqrt(p' q))), l1 = 2 tv, neg_log_acceptance = -log(alpha).
The loss of a batch is sum(weight x loss) / sum(weight).
"""

from math import pi, sqrt

import torch
from safetensors.torch import save_file

F64 = torch.float64
H, HEADS, KV_HEADS, D, I, V, TAPS = 16, 4, 2, 8, 24, 48, 3
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
    "reverse_kl": ({"reverse_kl": 1.0}, 1.0, 1.0),
    "jsd": ({"jsd": 1.0}, 1.0, 1.0),
    "renyi_half": ({"renyi_half": 1.0}, 1.0, 1.0),
    "l1": ({"l1": 1.0}, 1.0, 1.0),
    "neg_log_acceptance": ({"neg_log_acceptance": 1.0}, 1.0, 1.0),
    "mixture": ({"ce": 0.1, "tv": 0.9}, 0.7, 0.8),  # temperature 0.7, weights 0.8^d
}


def rms_norm(x, gain):
    return x / torch.sqrt((x * x).mean() + EPS) * gain


def head_norm(x, gain):
    """Heads `[n, D]`, each normed by itself."""
    return torch.stack([rms_norm(head, gain) for head in x])


def inverse_frequencies(llama3=False):
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


def gated_mlp(w, x, prefix=""):
    gate = w[prefix + "gate_proj"] @ x
    return w[prefix + "down_proj"] @ (gate * torch.sigmoid(gate) * (w[prefix + "up_proj"] @ x))


def valid_slots(turns, num_depths):
    """(anchor, depth) whose tokens anchor .. anchor+1+depth lie in one turn; anchor at least 1."""
    return [
        (a, d)
        for a in range(1, len(turns))
        for d in range(num_depths)
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
    middle = (renormalised + q) / 2
    value = {
        "kl": kl,
        "tv": 1 - alpha,
        "lk_hybrid": mix * kl + (1 - mix) * (1 - alpha),
        "ce": -log_q[keep.index(token)] if token in keep else torch.zeros((), dtype=F64),
        "ce_argmax": -log_q[int(p.argmax())],
        "reverse_kl": (q * (log_q - renormalised.log())).sum(),
        "jsd": (
            (renormalised * (renormalised / middle).log()).sum() + (q * (q / middle).log()).sum()
        )
        / 2,
        "renyi_half": -2 * (renormalised * q).sqrt().sum().log(),
        "l1": 2 * (1 - alpha),
        "neg_log_acceptance": -alpha.log(),
    }
    return sum(c * value[name] for name, c in losses.items()), float(alpha.detach())


def draw(generator, *shape, scale=1.0):
    """Values that f32 holds exactly."""
    return (torch.randn(shape, generator=generator) * scale).to(F64)


def matrix(generator, out, width):
    return draw(generator, out, width, scale=width**-0.5)


def gain(generator, width=H):
    return (0.5 + torch.rand(width, generator=generator)).to(F64)


def parameters(weights):
    """Rounded to what f32 holds, with gradients."""
    return {name: value.to(torch.float32).to(F64).requires_grad_() for name, value in weights.items()}


def make_case(path, seed, draw_weights, outputs, keep, num_depths, head=None, confidence=None):
    """One file: weights, documents, logits of every valid slot, losses, gradients of all weights.

    `head(weights)` is the matrix that output rows are multiplied by, `confidence(weights, row)` the logit of
    the drafter's own guess of alpha; with one, the loss `confidence` is kl plus its binary cross entropy.
    """
    head = head or (lambda w: w["head"])
    generator = torch.Generator().manual_seed(seed)
    w = parameters(draw_weights(generator, len(keep)))
    embedding, target_head = draw(generator, V, H), draw(generator, V, H, scale=0.5)
    final_norm = (0.5 + 2.5 * torch.rand(H, generator=generator)).to(F64)
    slots, logits, teacher, tokens, guesses = [], [], [], [], []
    saved = dict(embedding=embedding, target_head=target_head, final_norm=final_norm)
    for row, (length, turns) in enumerate(zip(LENGTHS, TURNS)):
        document = dict(embedding=embedding, turns=turns, final_norm=final_norm)
        document["ids"] = torch.randint(0, V, (length,), generator=generator).tolist()
        document["aux"] = draw(generator, length, TAPS * H)
        document["final_hidden"] = draw(generator, length, H, scale=3.0)
        saved |= {f"ids.{row}": torch.tensor(document["ids"]), f"turns.{row}": torch.tensor(turns)}
        saved |= {f"{name}.{row}": document[name] for name in ("aux", "final_hidden")}
        rows = outputs(w, document)
        for a, d in valid_slots(turns, num_depths):
            slots.append([row, a, d])
            logits.append(head(w) @ rows[a, d])
            if confidence:
                guesses.append(confidence(w, rows[a, d]))
            teacher.append(target_head @ rms_norm(document["final_hidden"][a + d], final_norm))
            tokens.append(document["ids"][a + 1 + d])
    saved |= {f"weight.{n}": v for n, v in w.items()}
    saved |= {"slots": torch.tensor(slots), "logits": torch.stack(logits)}
    all_losses = LOSSES | ({"confidence": ({"kl": 1.0}, 1.0, 0.8)} if confidence else {})
    for loss_name, (losses, temperature, decay) in all_losses.items():
        pairs = [
            slot_loss(losses, logits[i], teacher[i], tokens[i], keep, temperature)
            for i in range(len(slots))
        ]
        if loss_name == "confidence":
            bce = torch.nn.functional.binary_cross_entropy_with_logits
            label = lambda alpha: torch.tensor(alpha, dtype=F64)
            pairs = [(v + bce(g, label(alpha)), alpha) for g, (v, alpha) in zip(guesses, pairs)]
        weight = [decay ** slot[2] for slot in slots]
        loss = sum(c * value for c, (value, _) in zip(weight, pairs)) / sum(weight)
        gradient = torch.autograd.grad(
            loss, list(w.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        saved[f"{loss_name}.loss"] = loss.reshape(1)
        saved[f"{loss_name}.alpha"] = torch.tensor([alpha for _, alpha in pairs])
        saved |= {f"{loss_name}.grad.{n}": g for n, g in zip(w, gradient)}
    as_file = lambda v: v.detach().contiguous().to(torch.float32 if v.is_floating_point() else v.dtype)
    save_file({n: as_file(v) for n, v in saved.items()}, path)
    inside = sum(token in keep for token in tokens)
    print(path.stem, len(slots), "slots,", inside, "data tokens inside the draft vocabulary")
