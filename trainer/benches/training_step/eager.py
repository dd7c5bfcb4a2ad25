"""One training step of a drafter in eager PyTorch, the counterpart of case.rs.

Usage: python eager.py eagle3|dflash [steps] [trained] [bf16] [whole-teacher]        (torch 2.13.0)

The same mathematics at the shapes of SmolLM2-135M with random states: 4 rows of 225 tokens, draft vocabulary 8192 of
49152, KL against the renormalised teacher, overlap with the teacher of the whole vocabulary, clipping, AdamW. EAGLE-3
unrolls 3 steps; DFlash has 2 layers and fills 60 blocks of 8 tokens a row. bf16 is autocast. The teacher's log-sum-exp
over the whole vocabulary is given for each position and its logits are computed for the draft vocabulary only; with
`whole-teacher` each step computes all of them. Prints the median step after the first and the peak of the resident
memory.
"""

import resource
import sys
import time

import torch
import torch.nn.functional as F

family = sys.argv[1]
steps = next((int(word) for word in sys.argv if word.isdigit()), 6)
trained = "trained" in sys.argv
whole_teacher = "whole-teacher" in sys.argv
dtype = torch.bfloat16 if "bf16" in sys.argv else None
torch.set_num_threads(2)
torch.manual_seed(0)
B, S, PROMPT, H, HEADS, KV, D, I, V, VD = 4, 225, 45, 576, 9, 3, 64, 1536, 49152, 8192
UNROLLED, LAYERS, BLOCK, ANCHORS = 3, 2, 8, 60
EPS = 1e-5


def matrix(out, width):
    return torch.nn.Parameter(torch.randn(out, width) * width**-0.5)


def layer(width):
    return dict(
        q=matrix(HEADS * D, width), k=matrix(KV * D, width), v=matrix(KV * D, width), o=matrix(H, HEADS * D),
        gate=matrix(I, H), up=matrix(I, H), down=matrix(H, I),
    )  # fmt: skip


def gains(*sizes):
    return [torch.nn.Parameter(torch.ones(size)) for size in sizes]


layers = [layer(2 * H)] if family == "eagle3" else [layer(H) for _ in range(LAYERS)]
fc = matrix(H, 3 * H)
# EAGLE-3: embedding, hidden, MLP, output; DFlash: context, output, and in each layer input, MLP, queries, keys.
outer_gains = gains(H, H, H, H) if family == "eagle3" else gains(H, H)
layer_gains = [] if family == "eagle3" else [gains(H, H, D, D) for _ in range(LAYERS)]
target_head = torch.randn(V, H) * 0.05
keep = torch.arange(VD) * 6
kept_head = target_head[keep].clone()
head = torch.nn.Parameter(kept_head.clone(), requires_grad=trained and family == "eagle3")
params = [fc, head, *outer_gains, *sum(layer_gains, []), *(p for group in layers for p in group.values())]
params = [p for p in params if p.requires_grad]
optimizer = torch.optim.AdamW(params, lr=1e-4)
aux, final = torch.randn(B, S, 3 * H), torch.randn(B, S, H)
ids = torch.randint(0, V, (B, S))
log_z = torch.cat([torch.logsumexp(F.linear(row, target_head), -1, keepdim=True) for row in final]).view(B, S, 1)
embedding = target_head
angle = torch.arange(S + BLOCK)[:, None] * 1e5 ** (-torch.arange(0, D, 2) / D)
cos, sin = angle.cos(), angle.sin()
causal = torch.ones(S, S, dtype=torch.bool).tril()


def norm(x, gain):
    return F.rms_norm(x.float(), gain.shape, gain, EPS)


def rotate(x, c, s):
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([first * c - second * s, second * c + first * s], -1)


def mlp(w, x):
    return F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"]), w["down"])


def heads(x, n, step):
    x = x.view(B, S, n, D).transpose(1, 2)
    return x if step is None else rotate(x, cos[step : step + S], sin[step : step + S])


def eagle3():
    """Output rows and their teacher's places, depth after depth."""
    (w,), (embed, hidden_gain, mlp_gain, out_gain) = layers, outer_gains
    hidden, keys, values, outputs = F.linear(aux, fc), [], [], []
    for step in range(UNROLLED):
        token = F.embedding(torch.roll(ids, -1 - step, 1), embedding)
        both = torch.cat([norm(token, embed), norm(hidden, hidden_gain)], -1)
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
        hidden = hidden + mlp(w, norm(hidden, mlp_gain))
        outputs.append(norm(hidden, out_gain))
    # Anchor a reads row a - 1 and predicts token a + 1 + depth.
    for depth, output in enumerate(outputs):
        rows = output[:, PROMPT - 1 : S - 2 - depth]
        yield rows, lambda log_p, depth=depth, n=rows.shape[1]: log_p[:, depth : depth + n]


def dflash():
    """Output rows and their teacher's places, all at once."""
    anchors = torch.stack([torch.randperm(S - 1 - PROMPT)[:ANCHORS].sort().values + PROMPT for _ in range(B)])
    context_gain, out_gain = outer_gains
    context = norm(F.linear(aux, fc), context_gain)
    at = anchors[..., None] + torch.arange(BLOCK)  # [B, A, n], positions
    tokens = torch.full((B, ANCHORS, BLOCK), 5)
    tokens[..., 0] = ids.gather(1, anchors)
    hidden = F.embedding(tokens, embedding)  # [B, A, n, H]
    c, s = cos[at][:, :, :, None], sin[at][:, :, :, None]
    unseen = (torch.arange(S) >= anchors[..., None]).repeat_interleave(BLOCK, 1)[:, None]  # [B, 1, A n, S]
    group = HEADS // KV
    for w, (in_gain, mlp_gain, q_gain, k_gain) in zip(layers, layer_gains):
        x = norm(hidden, in_gain)
        q = rotate(norm(F.linear(x, w["q"]).view(B, ANCHORS, BLOCK, HEADS, D), q_gain), c, s)
        k = rotate(norm(F.linear(x, w["k"]).view(B, ANCHORS, BLOCK, KV, D), k_gain), c, s)
        v = F.linear(x, w["v"]).view(B, ANCHORS, BLOCK, KV, D)
        past_k = rotate(norm(F.linear(context, w["k"]).view(B, S, KV, D), k_gain), cos[:S, None], sin[:S, None])
        past_k = past_k.transpose(1, 2).repeat_interleave(group, 1)  # [B, heads, S, D]
        past_v = F.linear(context, w["v"]).view(B, S, KV, D).transpose(1, 2).repeat_interleave(group, 1)
        k, v = (x.repeat_interleave(group, 3).permute(0, 3, 1, 2, 4) for x in (k, v))  # [B, heads, A, n, D]
        q = q.permute(0, 3, 1, 2, 4)
        past = q.flatten(2, 3) @ past_k.transpose(2, 3)  # [B, heads, A n, S]
        past = past.masked_fill(unseen, float("-inf")).view(B, HEADS, ANCHORS, BLOCK, S)
        weight = torch.softmax(torch.cat([past, q @ k.transpose(3, 4)], -1).float() * D**-0.5, -1)
        mixed = (weight[..., :S].flatten(2, 3).to(past_v.dtype) @ past_v).view(B, HEADS, ANCHORS, BLOCK, D)
        mixed = mixed + weight[..., S:].to(v.dtype) @ v
        hidden = hidden + F.linear(mixed.permute(0, 2, 3, 1, 4).reshape(B, ANCHORS, BLOCK, H), w["o"])
        hidden = hidden + mlp(w, norm(hidden, mlp_gain))
    valid = at[..., 1:] < S  # block position k predicts token a + k
    row = torch.arange(B)[:, None, None].expand_as(valid)[valid]
    place = (at[..., 1:] - 1 - PROMPT)[valid]
    yield norm(hidden[:, :, 1:][valid], out_gain), lambda log_p: log_p[row, place]


def step():
    loss, overlap, slots = 0.0, 0.0, 0
    with torch.no_grad():
        if whole_teacher:
            log_p = torch.log_softmax(F.linear(final[:, PROMPT:], target_head).float(), -1)[..., keep]
        else:
            log_p = F.linear(final[:, PROMPT:], kept_head).float() - log_z[:, PROMPT:]
    for rows, taught_by in eagle3() if family == "eagle3" else dflash():
        teacher = taught_by(log_p)
        log_q = torch.log_softmax(F.linear(rows, head).float(), -1)
        p = teacher.exp()
        mass = p.sum(-1, keepdim=True)
        loss = loss + (p / mass * (teacher - mass.log() - log_q)).sum()
        overlap += float(torch.minimum(p, log_q.detach().exp()).sum())
        slots += teacher.shape[:-1].numel()
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
print(f"{B * S} tokens, {slots} slots a step, {dtype or 'f32'}")
print(f"step {median * 1e3:.1f} ms, {B * S / median:.0f} tokens/s")
print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")
