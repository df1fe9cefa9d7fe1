"""Training of SeKV's router: its parts against slow references, and what a run promises."""

from __future__ import annotations

import itertools
import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB
from hypothesis import given
from hypothesis import strategies as st

from kv_integration import attach
from kv_integration.router import Router
from kv_integration.router_training import (
    DivergedError,
    TextTooShortError,
    Training,
    log,
    loop,
    train_router,
    window,
)
from kv_integration.router_training.forward import Call, Recording, record, rerun, taken_over
from kv_integration.router_training.losses import Losses, reconstruction_error, zoom_loss
from kv_integration.router_training.spans import TextSpans, layer_spans
from kv_integration.router_training.student import MixedRows, straight_through
from kv_integration.router_training.teacher import ExactRows, coverage_target, mine
from kv_integration.router_training.window import window_losses
from kv_integration.spans import Spans

SMALL = Training(
    steps=4,
    batch=2,
    lengths=(64, 96),
    checkpoint_every=2,
    min_length=2,
    max_length=8,
    window=8,
    budgets=(0.4, 0.6),
    candidates=12,
    mined=4,
    random=3,
    max_rank=4,
    routing_dim=8,
    seed=3,
)


def tokenize(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    assert not add_special_tokens
    return {"input_ids": [int(word) for word in text.split()]}


def make_texts(count: int = 3, tokens: int = 120, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(map(str, draw.integers(2, VOCAB, tokens))) for _ in range(count)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().eval()
    with torch.no_grad():  # sharper than at random, so that heads look somewhere
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(12)
    return model


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 7),
    width=st.integers(1, 7),
)
def test_eq_14_is_the_error_of_the_reconstruction(seed, rows, width):
    """|| sum_i s_i u_i v_i^T - sum_i m_i s_i u_i v_i^T ||_F^2, the matrices written out."""
    draw = np.random.default_rng(seed)
    u, s, v = np.linalg.svd(draw.standard_normal((rows, width)), full_matrices=False)
    gates = draw.random(len(s))
    difference = sum((1 - gates[i]) * s[i] * np.outer(u[:, i], v[i]) for i in range(len(s)))
    found = reconstruction_error(torch.tensor(gates), torch.tensor(s))
    assert np.isclose(float(found), np.square(difference).sum(), rtol=1e-10, atol=1e-12)


@given(
    relevance=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=9),
    threshold=st.floats(0, 1, width=32),
)
def test_the_straight_through_gate_is_the_hard_one_going_forward(relevance, threshold):
    relevance = torch.tensor(relevance, requires_grad=True)
    threshold = torch.tensor(threshold, requires_grad=True)
    zoom = straight_through(relevance, threshold)
    assert zoom.tolist() == [float(a > threshold) for a in relevance.tolist()]
    zoom.sum().backward()
    assert relevance.grad.tolist() == [1.0] * len(relevance)
    assert float(threshold.grad) == -len(relevance)


@given(
    masses=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    hidden=st.sets(st.integers(0, 6)),
    coverage=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_the_target_is_the_smallest_set_that_covers(masses, hidden, coverage):
    mass = torch.tensor(masses, dtype=torch.float32) / 8
    compressed = torch.tensor([i not in hidden for i in range(len(masses))])
    target = coverage_target(mass, compressed, coverage)
    assert not bool((target & ~compressed).any())
    able = [i for i in range(len(masses)) if compressed[i]]
    wanted = coverage * sum(masses[i] for i in able) / 8

    def covers(spans) -> bool:
        return sum(masses[i] for i in spans) / 8 >= wanted - 1e-6

    smallest = next(
        size
        for size in range(len(able) + 1)
        if any(map(covers, itertools.combinations(able, size)))
    )
    chosen = target.nonzero()[:, 0].tolist()
    assert covers(chosen) and len(chosen) == smallest


def test_mined_rows_are_those_that_look_at_one_span():
    masses = torch.zeros(2, 2, 4, 5)
    masses[:, :, :, 0] = 0.9  # a sink that every row attends
    masses[1, 0, 2, 3] = 0.8
    masses[0, 1, 0, 1] = 0.5
    masses[0, 1, 3, 4] = 1.0  # but not compressed there
    compressed = torch.ones(4, 5, dtype=torch.bool)
    compressed[3, 4] = False
    assert mine(masses, compressed, 2).tolist() == [0, 2]
    assert mine(masses, compressed, 9).tolist() == [0, 1, 2, 3]


def test_the_zoom_loss_weighs_relevant_spans():
    logits, target = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([True, False, True])
    used = torch.tensor([True, True, False])
    a, b = (1 / (1 + math.exp(-x)) for x in (0.3, -1.0))
    wanted = (-10 * math.log(a) - math.log(1 - b)) / 2
    assert math.isclose(float(zoom_loss(logits, target, used, 10.0)), wanted, rel_tol=1e-5)
    assert float(zoom_loss(logits, target, torch.zeros(3).bool(), 10.0)) == 0


def random_layer(seed, *, groups, heads, lengths, gap, dim=4):
    """A recording of one layer, spans with `gap` other tokens before each, and rows."""
    draw = torch.Generator().manual_seed(seed)
    tokens, at = [], 0
    for length in lengths:
        tokens += range(at + gap, at + gap + length)
        at += gap + length
    total = at + 6
    keys, values = (torch.randn(heads, total, dim, generator=draw) for _ in range(2))
    recording = Recording(torch.zeros(total, dtype=torch.int64), {0: 0})
    recording.keys[0], recording.values[0] = keys, values
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    weights = torch.rand(len(tokens), generator=draw) + 0.1
    spans = Spans(torch.empty(0), torch.tensor(tokens), offsets, weights, 0)
    rows = torch.randperm(total, generator=draw)[:5].sort().values
    q = torch.randn(1, groups * heads, len(rows), dim, generator=draw)
    k, v = (torch.randn(1, heads, len(rows), dim, generator=draw) for _ in range(2))
    return recording, TextSpans.of(spans, total), rows, Call(0, q, k, v, 0.6, None)


@given(
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 3),
    heads=st.integers(1, 2),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    gap=st.integers(0, 2),
    size=st.integers(1, 5),
    threshold=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
)
def test_mixed_attention_is_one_softmax_over_two_resolutions(
    seed, groups, heads, lengths, gap, size, threshold
):
    """Row by row, entry by entry, in float64."""
    recording, text, rows, call = random_layer(
        seed, groups=groups, heads=heads, lengths=lengths, gap=gap
    )
    router = Router(1, groups * heads, heads, 4, routing_dim=3, max_rank=3)
    with torch.no_grad():
        router.projections.normal_(generator=torch.Generator().manual_seed(seed))
        router.threshold_logits.fill_(torch.tensor(threshold).logit())
    layer = layer_spans(recording.keys[0], recording.values[0], text, 3)
    mixed = MixedRows(router, recording, rows, text, [layer], size)
    found = mixed(call)[0].detach().double().numpy()
    routed = mixed.routed[0]

    keys, values = (x[0].double().numpy() for x in (recording.keys, recording.values))
    tokens = text.spans.tokens.tolist()
    bounds = text.spans.offsets.tolist()
    spans = [tokens[a:b] for a, b in itertools.pairwise(bounds)]
    weights = [text.spans.weights[a:b].double().numpy() for a, b in itertools.pairwise(bounds)]
    for head in range(groups * heads):
        kv = head // groups
        for i, row in enumerate(rows.tolist()):
            q = call.query[0, head, i].double().numpy() * 0.6
            entries = [
                (call.key[0, kv, i].double().numpy(), call.value[0, kv, i].double().numpy(), 1)
            ]
            gone = set()
            for s, span in enumerate(spans):
                if span[-1] > row - size:
                    continue
                gone |= set(span)
                group = range(kv * groups, (kv + 1) * groups)
                if any(routed.logits[g, i, s].sigmoid() > threshold for g in group):
                    parts = []
                    for x, gates in zip((keys, values), routed.gates, strict=True):
                        u, sigma, v = np.linalg.svd(x[kv, span], full_matrices=False)
                        r = min(3, len(sigma))
                        m = gates[kv, s, :r].detach().double().numpy()
                        parts.append((u[:, :r] * (m * sigma[:r])) @ v[:r])
                    entries += [(k, v, 1) for k, v in zip(*parts, strict=True)]
                else:
                    share = weights[s] / weights[s].sum()
                    entries.append((share @ keys[kv, span], share @ values[kv, span], len(span)))
            entries += [(keys[kv, t], values[kv, t], 1) for t in range(row) if t not in gone]
            power = np.array([n * np.exp(q @ k) for k, _, n in entries])
            wanted = (power[:, None] * np.array([v for _, v, _ in entries])).sum(0) / power.sum()
            assert np.allclose(found[head, i], wanted, atol=2e-4)


ROPES = ("llama", "llama-mqa", "qwen3", "gemma3", "cohere2", "smollm3", "glm4", "gpt2")


@pytest.mark.parametrize("family", [*ROPES, "dynamic", "phi3-longrope"])
def test_rows_rerun_exactly_give_the_models_own_logits(family):
    """Also where RoPE depends on the length, and the rows alone would be a short text."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    ids = torch.randint(2, VOCAB, (48,))
    rows = torch.tensor([0, 3, 20])
    with torch.no_grad():
        wanted = model(ids[None]).logits[0, rows]
        with taken_over(model):
            recording = record(model, ids)
            found = rerun(model, recording, rows, ExactRows(recording, rows))
        assert torch.allclose(found, wanted, atol=1e-4)
        logits = model(ids[None]).logits[0].log_softmax(-1)
        log_p = -logits[:-1].gather(1, ids[1:, None])[:, 0]
    assert torch.allclose(recording.surprisal[1:], log_p, atol=1e-3)


def test_a_lossless_student_is_the_teacher(model):
    """All spans expanded, every component kept: nothing is lost but the sigmoid's last digit."""
    ids = torch.tensor(tokenize(make_texts(1)[0], add_special_tokens=False)["input_ids"])
    router = Router.for_model(model, routing_dim=8)
    with torch.no_grad():
        router.threshold_logits.fill_(-40)
        router.predictor.leave.weight.zero_()
        router.predictor.leave.bias.fill_(30)
        with taken_over(model):
            recording = record(model, ids)
            cut = SMALL.segmentation(anchors=True).spans(recording.surprisal, 48)
            text = TextSpans.of(cut, len(ids))
            rows = torch.arange(100, 120)
            layers = window.memory(recording, text, router)
            student = MixedRows(router, recording, rows, text, layers, 8)
            found = rerun(model, recording, rows, student)
            wanted = rerun(model, recording, rows, ExactRows(recording, rows))
    assert text.count > 3 and bool(student.compressed.any())
    assert torch.allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize("term", ["total", "distill", "zoom", "recon", "budget"])
def test_gradients_reach_what_is_learnt_and_nothing_else(model, term):
    router = Router.for_model(model, routing_dim=8, max_rank=4)
    ids = torch.tensor(tokenize(make_texts(1)[0], add_special_tokens=False)["input_ids"])
    with loop.frozen(model), taken_over(model):
        losses = window_losses(model, router, ids, SMALL, np.random.default_rng(0))
    loss = losses.total(SMALL, 0.1) if term == "total" else getattr(losses, term)
    loss.backward()
    moved = {n for n, p in router.named_parameters() if p.grad is not None and bool(p.grad.any())}
    gates = {n for n, _ in router.named_parameters() if n.startswith("predictor.")}
    # A span's summary is what g_phi sees, so its terms reach the projections, too. Queries of a
    # later layer depend on all that earlier ones decided, so the zoom loss reaches everything.
    wanted = {"projections"} | gates
    assert moved == (wanted if term == "recon" else wanted | {"threshold_logits"})
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_the_zoom_target_knows_nothing_of_the_router(model, monkeypatch):
    ids = torch.tensor(tokenize(make_texts(1)[0], add_special_tokens=False)["input_ids"])
    seen = []
    real = window.objective

    def spy(teacher, student, routed, target, used, compressed, settings):
        seen.append((target, used))
        return real(teacher, student, routed, target, used, compressed, settings)

    monkeypatch.setattr(window, "objective", spy)
    router = Router.for_model(model, routing_dim=8, max_rank=4)
    with taken_over(model), torch.no_grad():
        for logit in (-5.0, 5.0):
            router.threshold_logits.fill_(logit)
            window_losses(model, router, ids, SMALL, np.random.default_rng(0))
    (target, used), (again, used_again) = seen
    assert bool(target.any()) and torch.equal(target, again) and torch.equal(used, used_again)


def run(model, folder=None, **more):
    return train_router(
        model, tokenize, make_texts(), **{"settings": SMALL, "folder": folder} | more
    )


def test_training_lowers_its_loss_and_leaves_the_model_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kind, rows = model.config._attn_implementation, []
    settings = Training(
        **SMALL.as_dict()
        | {"steps": 16, "lengths": (96,), "budgets": (0.4,), "learning_rate": 0.02}
        | {"far_mass": 0.1, "few": 1.0}  # few heads of a random model concentrate
    )
    router = run(model, settings=settings, on_step=rows.append)
    assert [row["step"] for row in rows] == list(range(1, 17))
    zoom = [row["zoom"] for row in rows]
    assert sum(zoom[-5:]) < sum(zoom[:5])
    assert not any(p.requires_grad for p in router.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model.config._attn_implementation == kind and not model.training
    with attach(model):
        pass


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the test run itself ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("held_out", [(), tuple(make_texts(1, seed=9))])
@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.usefixtures("interruptible")
def test_a_resumed_run_is_the_uninterrupted_one(model, tmp_path, stop, held_out):
    settings = Training(**SMALL.as_dict() | {"validate_every": 2})
    whole = run(model, tmp_path / "whole", settings=settings, held_out=held_out)

    def interrupt(row):
        if row["step"] == stop:
            signal.raise_signal(signal.SIGINT)

    parts = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        run(model, parts, settings=settings, held_out=held_out, on_step=interrupt)
    resumed = run(model, parts, settings=settings, held_out=held_out)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert (parts / "log.csv").read_text() == (tmp_path / "whole" / "log.csv").read_text()
    again = run(model, parts, settings=settings, held_out=held_out)  # nothing is left to do
    assert torch.equal(again.projections, whole.projections)


def test_rows_of_steps_that_are_run_again_are_logged_once(model, tmp_path):
    """Killed between checkpoints: the log is ahead of the checkpoint."""

    class Killed(BaseException):
        pass

    def kill(row):
        if row["step"] == 3:
            raise Killed

    with pytest.raises(Killed):
        run(model, tmp_path, on_step=kill)
    run(model, tmp_path)
    assert [int(row["step"]) for row in log.read(tmp_path / "log.csv")] == [1, 2, 3, 4]


def test_a_loss_that_is_no_number_stops_and_keeps_the_checkpoint(model, tmp_path, monkeypatch):
    real, calls = loop.window_losses, itertools.count()

    def broken(*args):
        losses = real(*args)
        return losses._replace(zoom=losses.zoom * math.nan) if next(calls) == 7 else losses

    monkeypatch.setattr(loop, "window_losses", broken)
    with pytest.raises(DivergedError, match=r"stopped at step 4: .*'zoom': nan.* last good check"):
        run(model, tmp_path)
    monkeypatch.undo()
    resumed, whole = run(model, tmp_path), run(model)
    assert torch.equal(resumed.projections, whole.projections)


def test_a_gradient_that_is_no_number_stops(model, monkeypatch):
    real = loop.window_losses

    def broken(*args):
        losses = real(*args)
        return losses._replace(
            zoom=losses.zoom + (args[1].threshold_logits - args[1].threshold_logits).sqrt().sum()
        )

    monkeypatch.setattr(loop, "window_losses", broken)
    with pytest.raises(DivergedError, match="a gradient of norm nan"):
        run(model)


def test_training_stops_when_held_out_loss_rises(model, tmp_path, monkeypatch):
    wanted = iter([3.0, 1.0, 2.0, 2.0, 0.5])
    kept = []

    def drawn(model, router, texts, length, settings, step, index):
        if step == loop.VALIDATION:
            kept.append(router.projections.clone())
            value = torch.tensor(next(wanted))
            return SimpleNamespace(total=lambda *_: value)
        return real(model, router, texts, length, settings, step, index)

    real = loop.drawn_losses
    monkeypatch.setattr(loop, "drawn_losses", drawn)
    settings = Training(**SMALL.as_dict() | {"steps": 9, "validate_every": 1, "patience": 2})
    rows = []
    router = run(model, settings=settings, held_out=make_texts(1), on_step=rows.append)
    assert [row["validation"] for row in rows] == [3.0, 1.0, 2.0, 2.0]
    assert torch.equal(router.projections, kept[1])


def test_other_runs_are_refused(model, tmp_path):
    run(model, tmp_path)
    other = Training(**SMALL.as_dict() | {"learning_rate": 0.5})
    with pytest.raises(ValueError, match=r"of a run with learning_rate 0.001, now it is 0.5"):
        run(model, tmp_path, settings=other)
    with pytest.raises(ValueError, match="of a run with texts"):
        train_router(model, tokenize, make_texts(seed=1), settings=SMALL, folder=tmp_path)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="was made for the model"):
        run(FAMILIES["llama"](), tmp_path)


def test_texts_that_are_too_short(model):
    with pytest.raises(
        TextTooShortError, match="longest of 2 texts has 95 tokens, too short to tr"
    ):
        train_router(model, tokenize, make_texts(2, 95), settings=SMALL)
    with pytest.raises(TextTooShortError, match="of 0 texts has 0 tokens"):
        train_router(model, tokenize, [], settings=SMALL)
    settings = Training(**SMALL.as_dict() | {"budgets": (0.02,)})
    with pytest.raises(ValueError, match="grants 1 entries of this prompt of 64 tokens"):
        train_router(model, tokenize, make_texts(), settings=settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"warmup": 1.5}, "warmup must be between 0 and 1, got 1.5"),
        ({"learning_rate": math.nan}, "learning_rate must be finite and not negative, got nan"),
        ({"lengths": (64, 32)}, "lengths must rise from at least 2"),
        ({"lengths": ()}, "lengths must rise"),
        ({"budgets": (0.1, 1.0)}, "budgets must be shares between 0 and 1"),
    ],
)
def test_wrong_settings(change, message):
    with pytest.raises(ValueError, match=message):
        Training(**change)


def test_windows_longer_than_the_models_positions(model):
    settings = Training(**SMALL.as_dict() | {"lengths": (64, 1024)})
    with pytest.raises(ValueError, match="within the model's 512 positions, got 1024"):
        run(model, settings=settings)


def test_schedules_are_the_papers():
    settings = Training()
    rates = [settings.rate(step) for step in range(3000)]
    assert math.isclose(max(rates), 1e-3) and rates.index(max(rates)) in (299, 300)
    assert math.isclose(rates[0], 1e-3 / 300) and rates[-1] < 1e-8
    assert [settings.cost_weight(step) for step in (0, 750, 1500, 2999)] == [0.0, 0.05, 0.1, 0.1]
    assert [settings.length(step) for step in (0, 999, 1000, 2999)] == [8192, 8192, 16384, 32768]
    losses = Losses(*map(torch.tensor, (1.0, 10.0, 100.0, 1000.0, 0.0, 0.0)))
    assert math.isclose(float(losses.total(settings, 0.1)), 1 + 10 + 50 + 100, rel_tol=1e-6)


def test_the_figure_is_drawn(tmp_path):
    written = log.Log(tmp_path / "log.csv", 0)
    for step in range(1, 4):
        written.add({name: step for name in log.COLUMNS})
    log.plot(tmp_path / "log.csv", tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
