"""Which model something was made with, in a few letters."""

from __future__ import annotations

import hashlib

import torch
from transformers import PreTrainedModel

SAMPLES = 64  # numbers that are read of each parameter


@torch.no_grad()
def model_fingerprint(model: PreTrainedModel) -> str:
    """Class and SHA-256 of names, shapes and `SAMPLES` evenly spaced numbers of every parameter.

    Numbers are rounded to bfloat16 first, so that a checkpoint gives the same fingerprint whether
    it is loaded in its own precision, in float32 or in bfloat16. Devices make no difference;
    quantised weights give another fingerprint than those they were made from.

    Raises:
        TypeError: `model` is no transformers model.
        ValueError: a parameter holds no numbers (it is on the meta device).
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_meta:
            raise ValueError(f"the model has no fingerprint: {name} is on the meta device")
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().flatten()
        if flat.numel():
            at = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64).long()
            picked = flat[at.to(flat.device)].to(torch.bfloat16).cpu().contiguous()
            digest.update(picked.view(torch.int16).numpy().tobytes())
    return f"{type(model).__name__}-{digest.hexdigest()[:32]}"
