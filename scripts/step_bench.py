"""One EAGLE-3 training step in eager PyTorch, the counterpart of trainer/examples/step_bench.rs.

Usage: python scripts/step_bench.py [steps] [trained|frozen] [f32|bf16] [whole-teacher]        (torch 2.13.0)

The same mathematics at the shapes of SmolLM2-135M with random states: 4 rows of 225 tokens, 3 unrolled steps, draft
vocabulary 8192 of 49152, KL against the renormalised teacher, overlap with the teacher of the whole vocabulary,
clipping, AdamW. bf16 is autocast. The teacher's log-sum-exp over the whole vocabulary is given for each position and
its logits are computed for the draft vocabulary only; with `whole-teacher` each step computes all of them. Prints the median step after the first and the peak of the resident memory.
"""

import resource
import sys
import time

import torch
import torch.nn.functional as F

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 6
trained = "frozen" not in sys.argv
whole_teacher = "whole-teacher" in sys.argv
dtype = torch.bfloat16 if "bf16" in sys.argv else None
torch.set_num_threads(2)
torch.manual_seed(0)
B, S, PROMPT, K, H, HEADS, KV, D, I, V, VD = 4, 225, 45, 3, 576, 9, 3, 64, 1536, 49152, 8192
EPS = 1e-5


def matrix(out, width):
    return torch.nn.Parameter(torch.randn(out, width) * width**-0.5)


w = dict(
    fc=matrix(H, 3 * H), q=matrix(HEADS * D, 2 * H), k=matrix(KV * D, 2 * H), v=matrix(KV * D, 2 * H),
    o=matrix(H, HEADS * D), gate=matrix(I, H), up=matrix(I, H), down=matrix(H, I),
)  # fmt: skip
gains = {n: torch.nn.Parameter(torch.ones(H)) for n in ("embed", "hidden", "mlp", "norm")}
target_head = torch.randn(V, H) * 0.05
keep = torch.arange(VD) * 6
head = torch.nn.Parameter(target_head[keep].clone(), requires_grad=trained)
params = list(w.values()) + list(gains.values()) + ([head] if trained else [])
optimizer = torch.optim.AdamW(params, lr=1e-4)
aux, final = torch.randn(B, S, 3 * H), torch.randn(B, S, H)
ids = torch.randint(0, V, (B, S))
kept_head = target_head[keep]
log_z = torch.cat([torch.logsumexp(F.linear(row, target_head), -1, keepdim=True) for row in final]).view(B, S, 1)
embedding = target_head
angle = torch.arange(S + K)[:, None] * 1e5 ** (-torch.arange(0, D, 2) / D)
cos, sin = angle.cos(), angle.sin()
causal = torch.ones(S, S, dtype=torch.bool).tril()


def norm(x, gain):
    return F.rms_norm(x.float(), (H,), gain, EPS)


def heads(x, n, step):
    x = x.view(B, S, n, D).transpose(1, 2)
    if step is None:
        return x
    c, s = cos[step : step + S], sin[step : step + S]
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([first * c - second * s, second * c + first * s], -1)


def unroll():
    hidden, keys, values, outputs = F.linear(aux, w["fc"]), [], [], []
    for step in range(K):
        token = F.embedding(torch.roll(ids, -1 - step, 1), embedding)
        both = torch.cat([norm(token, gains["embed"]), norm(hidden, gains["hidden"])], -1)
        q = heads(F.linear(both, w["q"]), HEADS, step)
        keys.append(heads(F.linear(both, w["k"]), KV, step).repeat_interleave(HEADS // KV, 1))
        values.append(heads(F.linear(both, w["v"]), KV, None).repeat_interleave(HEADS // KV, 1))
        scores = [(q @ keys[0].transpose(2, 3) * D**-0.5).masked_fill(~causal, float("-inf"))]
        scores += [(q * key).sum(-1, keepdim=True) * D**-0.5 for key in keys[1:]]
        weight = torch.softmax(torch.cat(scores, -1).float(), -1)
        mixed = weight[..., :S].to(values[0].dtype) @ values[0]
        for i, value in enumerate(values[1:]):
            mixed = mixed + weight[..., S + i : S + i + 1] * value
        hidden = hidden + F.linear(mixed.transpose(1, 2).reshape(B, S, H), w["o"])
        x = norm(hidden, gains["mlp"])
        hidden = hidden + F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"]), w["down"])
        outputs.append(norm(hidden, gains["norm"]))
    return outputs


def step():
    outputs = unroll()
    loss, overlap, slots = 0.0, 0.0, 0
    with torch.no_grad():
        if whole_teacher:
            log_p = torch.log_softmax(F.linear(final[:, PROMPT:], target_head).float(), -1)[..., keep]
        else:
            log_p = F.linear(final[:, PROMPT:], kept_head).float() - log_z[:, PROMPT:]
    for depth, output in enumerate(outputs):
        # Anchor a reads row a - 1 and predicts token a + 1 + depth.
        rows = output[:, PROMPT - 1 : S - 2 - depth]
        teacher = log_p[:, depth : depth + rows.shape[1]]
        log_q = torch.log_softmax(F.linear(rows, head).float(), -1)
        p = teacher.exp()
        mass = p.sum(-1, keepdim=True)
        loss = loss + (p / mass * (teacher - mass.log() - log_q)).sum()
        overlap += float(torch.minimum(p, log_q.detach().exp()).sum())
        slots += rows.shape[0] * rows.shape[1]
    (loss / slots).backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return slots


times = []
for _ in range(steps + 1):
    start = time.time()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        slots = step()
    times.append(time.time() - start)
median = sorted(times[1:])[len(times[1:]) // 2]
print(f"{B * S} tokens, {slots} slots a step, head {'trained' if trained else 'frozen'}, {dtype or 'f32'}")
print(f"step {median * 1e3:.1f} ms, {B * S / median:.0f} tokens/s")
print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")
