"""SeKV's router: its parts against their formulas, and its file."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from kv_integration.fingerprint import model_fingerprint
from kv_integration.router import Router, leading_directions, router_shape
from kv_offload import (
    AlteredFileError,
    CacheFileError,
    FingerprintError,
    ForeignFileError,
    TruncatedFileError,
    save_cache,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return FAMILIES["llama"]()


def shaken(router: Router, seed: int = 0) -> Router:
    """The router with random numbers, so that nothing is special about them."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return router


def test_the_papers_count_for_llama_3_8b():
    """Section 3.3: 4.19M projections, 1,024 thresholds, g_phi under 0.1M; 0.05% of 8.03B."""
    router = Router(layers=32, query_heads=32, kv_heads=8, head_dim=128)
    assert router.projections.numel() == 4_194_304
    assert router.threshold_logits.numel() == 1024
    predictor = sum(p.numel() for p in router.predictor.parameters())
    assert 0 < predictor < 100_000
    assert router.trainable == 4_194_304 + 1024 + predictor < 4_300_000
    assert round(100 * router.trainable / 8.03e9, 2) == 0.05


def test_a_new_router_is_permissive():
    router = Router(2, 4, 2, 16, routing_dim=8, max_rank=6)
    assert torch.allclose(router.thresholds, torch.tensor(0.05))
    rows = router.projections
    assert torch.allclose(rows @ rows.mT, torch.eye(8).expand(2, 4, 8, 8))
    sigma = 10 * torch.rand(2, 5, 6).sort(descending=True).values
    gates = router.gates(1, sigma, router.summaries(1, torch.randn(2, 5, 16)), "value")
    assert gates.shape == sigma.shape and bool((gates > 0.9).all()) and bool((gates < 1).all())


@given(
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_summaries_and_logits_are_the_papers(seed, groups, heads, lengths):
    """Eqs. 3 to 5 token by token in float64."""
    draw = np.random.default_rng(seed)
    router = shaken(Router(2, groups * heads, heads, 6, routing_dim=4, max_rank=3), seed)
    weight = router.projections[1].detach().double().numpy()
    keys = [draw.standard_normal((heads, n, 6)) for n in lengths]
    surprise = [draw.random(n) + 0.1 for n in lengths]
    query = draw.standard_normal((groups * heads, 6))
    means = [(k * (w / w.sum())[:, None]).sum(1) for k, w in zip(keys, surprise, strict=True)]
    means = torch.tensor(np.stack(means, 1))
    summaries = router.summaries(1, means).detach()
    logits = router.logits(
        1, torch.tensor(query)[:, None], summaries, torch.tensor(lengths).log()
    ).detach()
    for head in range(groups * heads):
        for span, (k, w) in enumerate(zip(keys, surprise, strict=True)):
            share = w / w.sum()
            routed = sum(share[t] * weight[head] @ k[head // groups, t] for t in range(len(w)))
            routed /= np.linalg.norm(routed)
            wanted = (weight[head] @ query[head]) @ routed / math.sqrt(4) + math.log(len(w))
            assert np.allclose(summaries[head, span], routed, atol=1e-5)
            assert np.isclose(float(logits[head, 0, span]), wanted, atol=1e-4)


@given(seed=st.integers(0, 2**31), rank=st.integers(1, 6), batch=st.sampled_from([(), (3,)]))
def test_gates_of_fewer_components_are_those_of_a_spectrum_that_ends(seed, rank, batch):
    router = shaken(Router(2, 4, 2, 16, routing_dim=8, max_rank=6), seed)
    draw = torch.Generator().manual_seed(seed)
    sigma = torch.rand(*batch, 2, 5, rank, generator=draw).sort(descending=True).values
    summary = router.summaries(0, torch.randn(*batch, 2, 5, 16, generator=draw))
    short = router.gates(0, sigma, summary, "key")
    whole = router.gates(0, torch.nn.functional.pad(sigma, (0, 6 - rank)), summary, "key")
    assert torch.allclose(short, whole[..., :rank], atol=1e-6)
    assert bool(((short > 0) & (short < 1)).all())
    assert not torch.equal(short, router.gates(0, sigma, summary, "value"))


@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 12), wanted=st.integers(1, 5))
def test_leading_directions_hold_the_most_energy(seed, tokens, wanted):
    keys = torch.randn(2, tokens, 5, generator=torch.Generator().manual_seed(seed))
    found = leading_directions(keys, wanted).double()
    assert torch.allclose(found @ found.mT, torch.eye(wanted).double(), atol=1e-5)
    for head in range(2):
        spectrum = np.linalg.svd(keys[head].double().numpy(), compute_uv=False)
        energy = (keys[head].double() @ found[head].mT).square().sum()
        assert np.isclose(float(energy), (spectrum[:wanted] ** 2).sum(), rtol=1e-4)


def test_a_fingerprint_knows_a_model_in_any_precision(model):
    own = model_fingerprint(model)
    torch.manual_seed(1)
    assert model_fingerprint(FAMILIES["llama"]()) != own
    rounded = FAMILIES["llama"]().to(torch.bfloat16)
    assert model_fingerprint(rounded) == model_fingerprint(rounded.float())
    assert model_fingerprint(model) == own
    with pytest.raises(TypeError, match="PreTrainedModel"):
        model_fingerprint(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="meta device"):
        model_fingerprint(FAMILIES["qwen3"]().to("meta"))


def test_a_saved_router_is_the_same(model, tmp_path):
    router = shaken(Router.for_model(model))
    file = tmp_path / "router.safetensors"
    router.save(file, model=model)
    loaded = Router.load(file, model=model)
    for name, value in router.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with safe_open(file, "pt") as plain:  # any safetensors reader opens it
        assert set(plain.keys()) == set(router.state_dict())


def test_files_that_are_refused(model, tmp_path):
    file = tmp_path / "router.safetensors"
    router = Router.for_model(model)
    router.save(file, model=model)
    torch.manual_seed(1)
    with pytest.raises(FingerprintError, match="was made for the model"):
        Router.load(file, model=FAMILIES["llama"]())
    whole = file.read_bytes()
    cut, changed = tmp_path / "cut", tmp_path / "changed"
    cut.write_bytes(whole[:-10])
    changed.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TruncatedFileError, match="cut has"):
        Router.load(cut, model=model)
    with pytest.raises(AlteredFileError, match="changed does not match"):
        Router.load(changed, model=model)
    foreign = tmp_path / "foreign"
    save_file(router.state_dict(), foreign)
    with pytest.raises(ForeignFileError, match="foreign was not written"):
        Router.load(foreign, model=model)
    with pytest.raises(FileNotFoundError):
        Router.load(tmp_path / "none", model=model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "sentencekv"}, "holds 'sentencekv', wanted 'sekv-router'"),
        ({"extra": {"router_version": 2}}, "router of version 2, this kv-integration reads"),
        ({"extra": {"router_version": 1}}, "does not fit its shape"),
        (
            {
                "extra": {
                    "router_version": 1,
                    "shape": {"layers": 3, "query_heads": 4, "kv_heads": 2, "head_dim": 16}
                    | {"routing_dim": 8, "max_rank": 4},
                }
            },
            "does not fit its shape",
        ),
    ],
)
def test_other_contents_are_refused_by_name(model, tmp_path, change, message):
    file = tmp_path / "router.safetensors"
    tensors = Router.for_model(model).state_dict()
    fields = {"method": "sekv-router", "extra": {}} | change
    save_cache(file, tensors, fingerprint=model_fingerprint(model), **fields)
    with pytest.raises(CacheFileError, match=message):
        Router.load(file, model=model)


def test_shapes_of_models():
    assert router_shape(FAMILIES["llama"]().config) == (3, 4, 2, 16)
    assert router_shape(FAMILIES["gemma3"]().config) == (2, 4, 2, 16)
    assert router_shape(FAMILIES["gpt2"]().config) == (3, 4, 4, 16)
    with pytest.raises(ValueError, match="no layer with full attention"):
        router_shape(FAMILIES["mistral-sliding"]().config)


def test_wrong_arguments():
    router = Router(2, 4, 2, 16, routing_dim=8, max_rank=6)
    sigma, summary = torch.rand(2, 5, 6), torch.randn(4, 5, 8)
    for message, call in (
        ("kv_heads must divide the 4 query heads, got 3", lambda: Router(2, 4, 3, 16)),
        ("routing_dim must be at most head_dim 16", lambda: Router(2, 4, 2, 16)),
        ("must be at least 1, got 0", lambda: Router(0, 4, 2, 64)),
        ("layer must be within 0 and 1, got 2", lambda: router.gates(2, sigma, summary, "key")),
        ("kind must be 'key' or 'value'", lambda: router.gates(0, sigma, summary, "query")),
        ("sigma must be", lambda: router.gates(0, torch.rand(2, 5, 7), summary, "key")),
        ("summary must be", lambda: router.gates(0, sigma, summary[:2], "key")),
        ("directions must be", lambda: router.set_projection(0, torch.rand(3, 8, 16))),
        (
            "routing_dim must be within 1 and 16",
            lambda: leading_directions(torch.rand(2, 4, 16), 17),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
