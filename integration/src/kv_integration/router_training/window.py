"""One window of text: the teacher looks, rows are chosen, the student answers, losses come out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_integration.budget import budget_entries, split_window
from kv_integration.router import Router
from kv_integration.router_training.forward import Recording, record, rerun
from kv_integration.router_training.losses import Losses, objective
from kv_integration.router_training.settings import Training
from kv_integration.router_training.spans import LayerSpans, TextSpans, layer_spans
from kv_integration.router_training.student import MixedRows
from kv_integration.router_training.teacher import ExactRows, coverage_target, mine


def window_losses(
    model: PreTrainedModel,
    router: Router,
    ids: Tensor,
    settings: Training,
    rng: np.random.Generator,
) -> Losses:
    """Losses of a window of text, int64[T].

    The teacher runs the whole window once, and once more at candidate positions, where its
    attention to the spans is read. The student runs at the mined positions and at random ones:
    they see exact keys and values of everything before them, held as SeKV holds it.
    """
    with torch.autocast(ids.device.type, torch.bfloat16):
        recording = record(model, ids)
        granted = budget_entries(float(rng.choice(settings.budgets)), len(ids))
        anchors = bool(rng.random() >= settings.absorbed)
        spans = settings.segmentation(anchors=anchors).spans(recording.surprisal, granted)
        text, window = TextSpans.of(spans, len(ids)), split_window(granted, settings.window)[0]
        rows = candidate_rows(text, len(ids), window, settings.candidates, rng)
        compressed = text.compressed(rows, window)
        with torch.no_grad():
            teacher = ExactRows(recording, rows, text)
            logits = rerun(model, recording, rows, teacher)
        masses = torch.stack([teacher.masses[number] for number in sorted(teacher.masses)])

        mined = mine(masses, compressed, settings.mined)
        chosen = torch.cat((mined, others(len(rows), mined, settings.random, rng)))
        rows, compressed = rows[chosen], compressed[chosen]
        masses, logits = masses[:, :, chosen], logits[chosen]
        target = coverage_target(masses, compressed, settings.coverage)
        used = compressed & concentrated(masses, compressed, target, settings)
        used[:, :, len(mined) :] = False

        layers = memory(recording, text, router)
        student = MixedRows(router, recording, rows, text, layers, window)
        answer = rerun(model, recording, rows, student)
    return objective(logits, answer, student.routed, target, used, compressed, settings)


def candidate_rows(
    text: TextSpans, tokens: int, window: int, count: int, rng: np.random.Generator
) -> Tensor:
    """At most `count` positions drawn from those with a compressed span, ascending.

    There always is one: a budget below the whole text leaves a span before the last window.
    """
    able = np.arange(int(text.stop[0]) + window - 1, tokens)
    drawn = np.sort(rng.choice(able, size=min(count, len(able)), replace=False))
    return torch.from_numpy(drawn).to(text.stop.device)


def concentrated(masses: Tensor, compressed: Tensor, target: Tensor, settings: Training) -> Tensor:
    """bool[L, H_q, N, 1]: heads whose attention is mostly on a few compressed spans."""
    far = torch.where(compressed, masses, 0.0).sum(-1, keepdim=True)
    most = (settings.few * compressed.sum(-1, keepdim=True)).clamp_min(1)
    return (far >= settings.far_mass) & (target.sum(-1, keepdim=True) <= most)


def others(rows: int, mined: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """At most `count` numbers below `rows` that are not in `mined`."""
    rest = np.setdiff1d(np.arange(rows), mined.cpu().numpy())
    drawn = rng.choice(rest, size=min(count, len(rest)), replace=False)
    return torch.from_numpy(drawn).to(mined.device)


def memory(recording: Recording, text: TextSpans, router: Router) -> list[LayerSpans]:
    """What each layer with full attention holds of the spans."""
    return [
        layer_spans(recording.keys[layer], recording.values[layer], text, router.max_rank)
        for layer in recording.numbers
    ]
