"""The kernels on a GPU, compiled rather than interpreted. Run by test_gpu.py.

Results against float64, then what only a GPU can show: steps captured in a CUDA graph, no waiting
for the device, no memory taken but for results, keys and values read from pinned host memory.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from laws import DTYPES, agree, naive

import kv_attn_triton as kv

DEVICE = "cuda"
SIZES = (32, 64, 80, 96, 128, 256)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(dtype=torch.bfloat16, size=128, n=3000, queries=1, heads=2, group=4):
    """Inputs of a decode step, on the CPU."""
    rank, span_rank, picked = 48, 24, 500
    angle = random(1, n, size // 2, seed=5)
    angle = torch.cat([angle, angle], 2)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(6))[:picked].sort().values
    indices = order.expand(1, heads, -1).clone()
    indices[:, :, -3:] = -1
    offsets = torch.tensor([0, 40, 41, 41, n // 3, n // 3 + 70, n])
    count = len(offsets) - 1
    spans = torch.tensor([[3, 0, -1, 2, 5], [1, -1, 4, -1, -1]]).expand(1, -1, -1).clone()

    def basis(rank, seed, *spans):
        return (random(1, heads, *spans, rank, size, seed=seed) / rank**0.5).to(dtype)

    return {
        "q": random(1, heads * group, queries, size, dtype=dtype, seed=1),
        "k": random(1, heads, n, size, dtype=dtype, seed=2),
        "v": random(1, heads, n, size, dtype=dtype, seed=3),
        "log_size": random(1, heads, n, seed=4),
        "lengths": torch.tensor([[n, n // 3]], dtype=torch.int32),
        "indices": indices,
        "left": random(1, n, rank, dtype=dtype, seed=7),
        "right": basis(rank, 8),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "k_left": random(1, heads, n, span_rank, dtype=dtype, seed=11),
        "k_right": basis(span_rank, 9, count),
        "v_left": random(1, heads, n, span_rank, dtype=dtype, seed=12),
        "v_right": basis(span_rank, 10, count),
        "offsets": offsets,
        "spans": spans,
    }


def run(x, causal=False):
    """Every function of a decode step once."""
    q, k, v, picked = x["q"], x["k"], x["v"], x["indices"]
    whole = kv.attention(
        q, k, v, log_size=x["log_size"], lengths=x["lengths"], causal=causal, impl="triton"
    )
    some = kv.selected_attention(q, k, v, picked, log_size=x["log_size"], impl="triton")
    built = kv.lowrank_attention(
        q, x["left"], x["right"], v, picked, x["cos"], x["sin"], impl="triton"
    )
    merged = kv.merge_states([whole, some, built], impl="triton")
    best = kv.landmark_topk(q, k, 64, impl="triton")
    factors = (x["k_left"], x["k_right"], x["v_left"], x["v_right"])
    longest = k.shape[2]
    fine = kv.span_attention(q, *factors, x["offsets"], x["spans"], longest=longest, impl="triton")
    return [*whole, *some, *built, *merged, best, *fine]


def on_device(x):
    return {name: tensor.to(DEVICE) for name, tensor in x.items()}


def check_results():
    cases = [(dtype, size, 1) for dtype in DTYPES for size in SIZES]
    for dtype, size, queries in [*cases, (torch.bfloat16, 128, 8), (torch.float32, 64, 8)]:
        x = step(dtype, size, 700, queries)
        y = on_device(x)
        got = [tensor.cpu() for tensor in run(y, causal=True)]
        kw = {"log_size": x["log_size"], "lengths": x["lengths"], "causal": True}
        agree(got[0:2], naive(x["q"], x["k"], x["v"], **kw), x["v"])
        kw = {"log_size": x["log_size"], "indices": x["indices"]}
        agree(got[2:4], naive(x["q"], x["k"], x["v"], **kw), x["v"])
        keys = (x["left"][:, None].double() @ x["right"].double()).float()
        half = size // 2
        turned = torch.cat([-keys[..., half:], keys[..., :half]], 3)
        keys = keys * x["cos"][:, None] + turned * x["sin"][:, None]
        wanted = naive(x["q"], keys, x["v"], indices=x["indices"])
        slack = 5e-2 if dtype == torch.bfloat16 else 1e-2 if dtype == torch.float16 else 1e-4
        torch.testing.assert_close(got[4].double(), wanted[0], atol=slack, rtol=0)
        scores = (x["q"].double() @ x["k"].double().repeat_interleave(4, 1).mT / size**0.5).softmax(
            -1
        )
        scores = scores.sum(2).view(1, 2, 4, -1).amax(2)
        chosen = scores.gather(2, got[8])
        lowest = scores.sort(-1, descending=True).values[..., 63]
        assert bool((chosen.amin(-1) >= lowest - 1e-5).all())
        assert bool((got[8].diff(dim=-1) > 0).all())
        agree(got[9:11], *of_spans(x))
        window = kv.window_scores(y["q"], y["k"], impl="triton").cpu()
        torch.testing.assert_close(
            window, kv.window_scores(x["q"], x["k"], impl="reference"), atol=1e-4, rtol=1e-4
        )
        offsets = torch.tensor([0, 1, 200, 700])
        theta = far_from_cosines(x["k"])
        seeds = kv.cluster(y["k"], offsets, theta=theta, impl="triton").cpu()
        assert torch.equal(seeds, kv.cluster(x["k"], offsets, theta=theta, impl="reference"))


def of_spans(x):
    """Attention over the listed spans, every key and value rebuilt; and the values."""
    bounds = x["offsets"].tolist()
    keys, values = (
        torch.cat(
            [
                x[f"{name}_left"][:, :, low:high].double() @ x[f"{name}_right"][:, :, span].double()
                for span, (low, high) in enumerate(pairwise(bounds))
            ],
            2,
        )
        for name in "kv"
    )
    entries = [
        [i for span in row if span >= 0 for i in range(bounds[span], bounds[span + 1])]
        for row in x["spans"][0].tolist()
    ]
    longest = max(len(row) for row in entries)
    indices = torch.tensor([[[*row, *[-1] * (longest - len(row))] for row in entries]])
    return naive(x["q"], keys, values, indices=indices), values


def far_from_cosines(keys):
    """A threshold that rounding moves no pair of keys across: amid the widest gap of the top."""
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    cosines = (unit @ unit.mT).flatten()
    top = cosines[cosines < 0.99].sort().values[-200:]
    widest = int(top.diff().argmax())
    return float(top[widest : widest + 2].mean())


def check_graph():
    """A captured step, replayed on other inputs, gives what a plain call gives."""
    y = on_device(step())
    run(y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run(y)
    for seed in (11, 12):
        y["q"].copy_(random(*y["q"].shape, seed=seed))
        y["indices"][:, :, :200] += 1 if seed == 11 else -1
        graph.replay()
        replayed = [tensor.clone() for tensor in kept]
        for a, b in zip(replayed, run(y), strict=True):
            assert torch.equal(a, b)


def check_waits_for_nothing():
    y = on_device(step())
    run(y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_takes_no_memory_but_results():
    y = on_device(step())
    run(y)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    results = run(y)
    taken = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert taken == len(results), f"{taken} allocations for {len(results)} results"


def check_pinned_host_memory():
    x = step()
    y = on_device(x)
    wanted = run(y)
    for name in ("k", "v", "k_left", "k_right", "v_left", "v_right"):
        y[name] = x[name].pin_memory()
    for a, b in zip(run(y), wanted, strict=True):
        assert torch.equal(a, b)


def check_second_device():
    x = step()
    here = run({name: tensor.to("cuda:0") for name, tensor in x.items()})
    there = run({name: tensor.to("cuda:1") for name, tensor in x.items()})
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(here, there, strict=True))


CHECKS = [
    check_results,
    check_graph,
    check_waits_for_nothing,
    check_takes_no_memory_but_results,
    check_pinned_host_memory,
    check_second_device,
]


if __name__ == "__main__":
    for check in CHECKS:
        if check is check_second_device and torch.cuda.device_count() < 2:
            print(check.__name__, "left out: there is one device", flush=True)
            continue
        check()
        print(check.__name__, "ok", flush=True)
