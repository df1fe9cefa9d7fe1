"""What the launches share (splits, workspace, tuning), and laws of the kernels alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import INTERPRETER, agree, laws, naive, problems
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

import kv_attn_triton as kv
from kv_attn_triton.kernels import attention as kernel
from kv_attn_triton.kernels import landmarks, launch
from kv_attn_triton.kernels import spans as span_kernel

CPU = torch.device("cpu")


@laws()
@given(
    n=st.integers(0, 1 << 20),
    programs=st.integers(1, 2000),
    processors=st.sampled_from([8, 108, 132]),
)
def test_splits_cover_the_keys_and_fill_the_device(n, programs, processors):
    launch._processors.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_processors", lambda device: processors)
        splits, size = launch.split(n, programs, CPU)
    assert size % launch.MIN_SPLIT == 0 and splits >= 1
    assert (splits - 1) * size < max(n, 1) <= max(splits * size, 1)
    # two programs per processor, as far as tiles of keys allow and rounding to them
    tiles = math.ceil(n / launch.MIN_SPLIT)
    assert splits == tiles or splits * programs >= processors or size <= 2 * launch.MIN_SPLIT
    assert splits == 1 or (splits - 1) * programs <= 4 * processors


def test_workspace_is_used_again_and_grows(monkeypatch):
    monkeypatch.setattr(launch, "_workspaces", {})
    small = launch.workspace(100, CPU)
    assert small.numel() == 100 and small.dtype == torch.float32
    assert launch.workspace(128, CPU).data_ptr() == small.data_ptr()
    large = launch.workspace(1000, CPU)
    assert large.numel() == 1000 and launch.workspace(5, CPU).data_ptr() == large.data_ptr()


def test_tuning_inside_a_graph_capture_says_what_to_do(monkeypatch):
    configs = [object(), object()]
    assert launch._outside_capture(configs, {}, CAUSAL=True) == configs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call once with the same shapes before capturing"):
        launch._outside_capture(configs, {})


class Recorded(TorchDispatchMode):
    """Names of the operators that make a tensor of their own, outside the interpreter."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.made, self.launching = [], False
        call = GridExecutor.__call__

        def quiet(*args, **kwargs):
            self.launching = True
            try:
                return call(*args, **kwargs)
            finally:
                self.launching = False

        monkeypatch.setattr(GridExecutor, "__call__", quiet)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and not self.launching:
            self.made.append(func.overloadpacket.__name__)
        return result


def steps():
    """One call of each function of a decode step, on inputs as a model hands them over."""
    q = torch.randn(1, 3, 8, 16).transpose(1, 2)
    k, v = torch.randn(2, 1, 2, 300, 32)[..., 8:24]
    indices = torch.arange(200).expand(1, 2, -1)[..., :150]
    lengths = torch.tensor([[200, 7]], dtype=torch.int32)
    left, right = torch.randn(1, 300, 5), torch.randn(1, 2, 5, 16)
    cos, sin = torch.randn(2, 1, 400, 16)[:, :, :300]
    parts = [kv.attention(q, k, v), kv.attention(q, k[:, :, :9], v[:, :, :9])]
    starts = torch.tensor([[0, 100]])
    flat = k[0, 0], v[0, 0]
    # factors that heads share, and a bound on the length that makes two pieces
    lefts, rights = torch.randn(2, 600, 5), torch.randn(2, 3, 5, 16)
    factors = [x.expand(1, 2, *x.shape) for pair in zip(lefts, rights, strict=True) for x in pair]
    offsets, spans = torch.tensor([[0, 9, 30, 590]]), torch.tensor([[[2, 0, -1], [1, -1, -1]]])
    return {
        "attention": (2, lambda i: kv.attention(q, k, v, lengths=lengths, causal=True, impl=i)),
        "selected": (2, lambda i: kv.selected_attention(q, k, v, indices, impl=i)),
        "lowrank": (
            2,
            lambda i: kv.lowrank_attention(q, left, right, v, indices, cos, sin, impl=i),
        ),
        "ragged": (
            2,
            lambda i: kv.ragged_attention(q, *flat, starts, lengths, impl=i),
        ),
        "spans": (
            2,
            lambda i: kv.span_attention(q, *factors, offsets, spans, longest=560, impl=i),
        ),
        "merge": (2, lambda i: kv.merge_states(parts, impl=i)),
        "landmarks": (1, lambda i: kv.landmark_topk(q, k, 20, impl=i)),
    }


@pytest.mark.parametrize("name", steps())
def test_a_step_makes_nothing_but_its_results(name, monkeypatch):
    """Partial results and logits lie in the workspace, and strided inputs are not copied."""
    outputs, step = steps()[name]
    wanted = step("reference")
    step("triton")
    checks = {
        "aminmax",
        "eq",
        "min",
        "max",
        "add",
        "diff",
        "sub",
        "_local_scalar_dense",
    }  # of values, CPU only
    with Recorded(monkeypatch) as recorded:
        got = step("triton")
    made = [op for op in recorded.made if op not in checks and not op.startswith("fill")]
    assert len(made) == outputs and all("empty" in op for op in made), made
    if name == "landmarks":
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@laws(INTERPRETER)
@given(p=problems(max_n=40), pieces=st.integers(2, 5), seed=st.integers(0, 99))
def test_merging_by_kernel_equals_the_whole(p, pieces, seed):
    """Pieces may be empty, for some heads or for all."""
    rng = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, pieces, p.k.shape[:3], generator=rng)
    parts = []
    for piece in range(pieces):
        outside = p.log_size.masked_fill(owner != piece, -math.inf)
        out, lse = naive(p.q, p.k, p.v, log_size=outside)
        parts.append((out.to(p.q.dtype), lse.float()))
    agree(kv.merge_states(parts, impl="triton"), naive(p.q, p.k, p.v, log_size=p.log_size), p.v)


@laws(INTERPRETER)
@given(n=st.integers(1, 200), count=st.integers(1, 220), seed=st.integers(0, 99))
def test_ties_between_landmarks_fill_up_exactly(n, count, seed):
    """Scores of few distinct values: as many are chosen as wanted, all those above the lowest."""
    rng = torch.Generator().manual_seed(seed)
    level = torch.randint(0, 3, (1, 2, n), generator=rng)
    keys = torch.zeros(1, 2, n, 8)
    keys[..., 0] = level
    q = torch.ones(1, 4, 2, 8)
    got = kv.landmark_topk(q, keys, count, impl="triton")
    assert got.shape == (1, 2, count)
    for h in range(2):
        chosen = got[0, h][got[0, h] >= 0]
        assert len(chosen) == min(n, count) and bool((chosen.diff() > 0).all())
        best = level[0, h].sort(descending=True).values[: len(chosen)]
        assert torch.equal(level[0, h][chosen].sort(descending=True).values, best)


def test_many_landmarks_take_the_other_route(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    q, keys = torch.randn(1, 4, 2, 16, generator=rng), torch.randn(1, 2, 90, 16, generator=rng)
    fused = kv.landmark_topk(q, keys, 9, impl="triton")
    monkeypatch.setattr(landmarks, "LIMIT", 64)
    assert torch.equal(kv.landmark_topk(q, keys, 9, impl="triton"), fused)
    assert torch.equal(kv.landmark_topk(q, keys, 9, impl="reference"), fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_query_rows_than_a_program_takes(dtype):
    """A group of 9 with 8 queries: 72 rows in two programs."""
    rng = torch.Generator().manual_seed(4)
    q = torch.randn(1, 18, 8, 16, generator=rng).to(dtype)
    k, v = torch.randn(2, 1, 2, 100, 16, generator=rng).to(dtype)
    agree(kv.attention(q, k, v, causal=True, impl="triton"), naive(q, k, v, causal=True), v)
    scores = kv.window_scores(q, k, impl="triton")
    torch.testing.assert_close(scores, kv.window_scores(q, k, impl="reference"))
    left, right = k[:, 0], torch.eye(16, dtype=dtype).expand(1, 2, -1, -1)
    indices = torch.arange(0, 100, 4).expand(1, 2, -1).contiguous()
    table = torch.zeros(1, 100, 0)
    got = kv.lowrank_attention(q, left, right, v, indices, table, table, impl="triton")
    agree(got, naive(q, k[:, :1].expand_as(k), v, indices=indices), v)
    right = right.unsqueeze(2)
    args = (q, k, right, v, right, torch.tensor([0, 100]), torch.zeros(1, 2, 1, dtype=torch.int64))
    agree(kv.span_attention(*args, longest=100, impl="triton"), naive(q, k, v), v)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_values_out_of_range_answer_with_nan_and_read_nothing_outside():
    """As on CUDA, where they are not checked: the wrong head alone is NaN."""
    q, k, v = torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 200, 8), torch.ones(1, 2, 200, 8)
    whole = torch.full((1, 2, 1, 8), 1.0)

    def one_head_is_nan(state):
        out, lse = state
        assert torch.equal(out[:, 1], whole[:, 1]) and bool(lse[:, 1].isfinite().all())
        assert bool(out[:, 0].isnan().all()) and bool(lse[:, 0].isnan().all())

    for bad in (201, -1, 1 << 30):
        lengths = torch.tensor([[bad, 200]], dtype=torch.int32)
        one_head_is_nan(kernel.attention(q, k, v, None, lengths, None, False, 1.0))
    for bad in (200, -2, 1 << 40):
        indices = torch.arange(150).repeat(1, 2, 1)
        indices[0, 0, 70] = bad
        one_head_is_nan(kernel.attention(q, k, v, None, None, indices, False, 1.0))
    for start, length in ((-1, 3), (198, 3), (1 << 40, 1), (0, -1)):
        starts = torch.tensor([[start, 0]])
        lengths = torch.tensor([[length, 200]], dtype=torch.int32)
        state = kernel.ragged_attention(q, k[0, 0], v[0, 0], starts, lengths, None, 1.0)
        one_head_is_nan(state)
    factors = [k, torch.zeros(1, 2, 4, 8, 8), v, torch.eye(8).expand(1, 2, 4, -1, -1)]
    for span, start, stop in (
        (4, 50, 100),
        (-2, 50, 100),
        (1 << 40, 50, 100),
        (1, -1, 50),
        (1, 150, 201),
        (1, 50, 49),
        (1, 50, 151),  # longer than `longest`
    ):
        offsets, spans = torch.tensor([0, start, stop, 190, 200]), torch.tensor([[[span], [3]]])
        one_head_is_nan(span_kernel.span_attention(q, *factors, offsets, spans, 100, 1.0))
