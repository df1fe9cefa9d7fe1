"""Train the embedded model: retrieval by a taught circuit first, then prose, then length.

    python train_embedded.py --out ../src/kv_integration/embedded/model --work /tmp/embedded

Plain next-token training does not form the retrieval circuit in any time a small machine has, so
the first phases add a loss on three attention heads: in layer 0 one head attends the previous token
and one the token before it, and in layer 2 a head attends, at answer positions, the token to copy.
Later phases drop that loss and stretch the prose from 256 to 8,192 tokens. Layer 2 has no rotary
embedding (the class is SmolLM3), so what it matches does not depend on the distance.

Checkpoints are written after every phase and every few minutes; a second call resumes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import corpus
import numpy as np
import torch
from tasks import Episode, Sampler
from tokenizer import key_words, train_tokenizer
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerFast, SmolLM3Config, SmolLM3ForCausalLM

from kv_integration import haystack

PREVIOUS, BEFORE = 0, 2  # heads of layer 0: attend t - 1, attend t - 2
LOOKUP, CONTINUE = 0, 2  # heads of layer 2: find the key's number, find what follows its first half
TOKENS_PER_STEP = 8192
AUX_WEIGHT = 0.5
SAVE_EVERY_S = 240


@dataclass(frozen=True)
class Phase:
    """`lengths` are drawn at random per step; `good` ends the phase early (answer accuracy)."""

    name: str
    steps: int
    lengths: tuple[int, ...]
    learning_rate: float
    dense: float = 0.0
    taught: bool = False
    facts: tuple[int, int] = (1, 16)
    questions: int = 8
    good: float = 1.1


PHASES = (
    Phase("dense-64", 700, (66,), 1.5e-3, dense=1.0, taught=True, good=0.98),
    Phase("dense-128", 500, (132,), 1.5e-3, dense=1.0, taught=True, good=0.985),
    Phase("facts-256", 180, (256,), 1.5e-3, dense=0.25, taught=True, facts=(4, 10), good=0.985),
    Phase("prose-512", 360, (256, 512), 1.2e-3, dense=0.1, facts=(2, 16)),
    Phase("prose-2k", 350, (512, 1024, 2048), 1e-3, facts=(2, 32), questions=12),
    Phase("prose-8k", 300, (1024, 2048, 2048, 4096, 8192), 6e-4, facts=(1, 48), questions=16),
    Phase("anneal", 300, (1024, 2048, 4096, 8192), 3e-4, facts=(1, 24), questions=16),
)


def config(vocab: int, tokenizer: PreTrainedTokenizerFast) -> SmolLM3Config:
    return SmolLM3Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
        no_rope_layers=[1, 1, 0, 1],
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def prepare(work: Path) -> tuple[PreTrainedTokenizerFast, list[str], np.ndarray, np.ndarray]:
    """Tokenizer, key words and the two token streams (libraries, training topics), cached."""
    if not (work / "streams.npz").exists():
        libraries, topics = corpus.library_texts(), haystack.topics(held_out=False)
        phrases = [haystack.NEEDLE.split(" {")[0], haystack.QUESTION.split(" {")[0]] * 3000
        tokenizer = train_tokenizer([*libraries, *topics, *phrases], prose_vocab=3072)
        keys = key_words(tokenizer, libraries, 800)
        tokenizer.save_pretrained(work / "tokenizer")
        (work / "keys.json").write_text(json.dumps(keys))
        order = np.random.default_rng(0).permutation(len(libraries))
        streams = {}
        for name, texts in (("libraries", [libraries[i] for i in order]), ("topics", topics)):
            encoded = tokenizer([text + "\n\n" for text in texts], add_special_tokens=False)
            streams[name] = np.concatenate(
                [np.array(ids, np.int32) for ids in encoded["input_ids"]]
            )
        np.savez(work / "streams.npz", **streams)
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    streams = np.load(work / "streams.npz")
    keys = json.loads((work / "keys.json").read_text())
    return tokenizer, keys, streams["libraries"], streams["topics"]


def draw(sampler: Sampler, phase: Phase) -> list[Episode]:
    """One step's episodes, all of one length, TOKENS_PER_STEP tokens together."""
    length = int(sampler.rng.choice(phase.lengths))
    batch = []
    for _ in range(max(1, TOKENS_PER_STEP // length)):
        if sampler.rng.random() < phase.dense:
            batch.append(sampler.dense(length))
            continue
        most = min(phase.facts[1], max(1, length // 48))
        facts = int(sampler.rng.integers(min(phase.facts[0], most), most + 1))
        batch.append(sampler.document(length, facts, min(facts, phase.questions)))
    return batch


def taught_loss(attentions: tuple[torch.Tensor, ...], source: torch.Tensor) -> torch.Tensor:
    """Minus log of the attention weight that the taught heads give to the right token."""
    first, lookup = attentions[0].float(), attentions[2].float()
    parts = [
        -(first[:, head].diagonal(-step, 1, 2) + 1e-5).log().mean()
        for head, step in ((PREVIOUS, 1), (BEFORE, 2))
    ]
    row, at = (source >= 0).nonzero(as_tuple=True)
    weights = lookup[row, :, at - 1].gather(2, source[row, at][:, None, None].expand(-1, 4, 1))
    halves = source[row, at - 1] < 0  # the first half of a number follows no copied token
    head = torch.where(halves, LOOKUP, CONTINUE)
    parts.append(-(weights[torch.arange(len(row)), head, 0] + 1e-5).log().mean())
    return torch.stack(parts).mean()


def step(model, batch: list[Episode], phase: Phase) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss over the answers and a quarter of the prose; accuracy over the copied tokens."""
    ids = torch.from_numpy(np.stack([e.ids for e in batch]))
    answer = torch.from_numpy(np.stack([e.answer for e in batch]))
    prose = torch.from_numpy(np.stack([e.prose for e in batch]))
    source = torch.from_numpy(np.stack([e.source for e in batch]))
    with torch.autocast("cpu", torch.bfloat16):
        out = model.model(ids, use_cache=False, output_attentions=phase.taught)
        hidden = out.last_hidden_state[:, :-1]
        picked = prose[:, 1:] & (torch.rand(ids[:, 1:].shape) < 0.25)
        targets = ids[:, 1:]
        answers = answer[:, 1:]
        answer_logits = model.lm_head(hidden[answers])
        loss = F.cross_entropy(answer_logits.float(), targets[answers])
        stats = {"answer": loss.item()}
        if picked.any():
            prose_loss = F.cross_entropy(model.lm_head(hidden[picked]).float(), targets[picked])
            loss = loss + prose_loss
            stats["prose"] = prose_loss.item()
    if phase.taught:
        aux = taught_loss(out.attentions, source)
        stats["taught"] = aux.item()
        loss = loss + AUX_WEIGHT * aux
    copied = source[:, 1:][answers] >= 0
    hit = answer_logits.argmax(-1) == targets[answers]
    stats["accuracy"] = hit[copied].float().mean().item()
    return loss, stats


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the model.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Checkpoints, corpus.")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(out: Path, work: Path, seed: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, keys, libraries, topics = prepare(work)
    model = SmolLM3ForCausalLM(config(-(-len(tokenizer) // 64) * 64, tokenizer)).float()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    state = {"phase": 0, "step": 0, "tokens": 0, "seconds": 0.0}
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]

    def save() -> None:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state},
            checkpoint.with_suffix(".new"),
        )
        checkpoint.with_suffix(".new").replace(checkpoint)

    sampler = Sampler(tokenizer, [libraries, topics], [0.7, 0.3], keys, seed + state["tokens"])
    log = (work / "log.jsonl").open("a")
    last_save = time.time()
    for number in range(state["phase"], len(PHASES)):
        phase = PHASES[number]
        model.set_attn_implementation("eager" if phase.taught else "sdpa")
        smooth: dict[str, float] = {}
        begun = state["step"]
        for index in range(begun, phase.steps):
            tick = time.time()
            target = PHASES[min(number + 1, len(PHASES) - 1)].learning_rate
            if number == len(PHASES) - 1:
                target = phase.learning_rate / 20
            share = index / phase.steps
            warm = min(1.0, (index + 1) / (100 if number == 0 else 20))
            for group in optimizer.param_groups:
                group["lr"] = warm * (phase.learning_rate * (1 - share) + target * share)
            loss, stats = step(model, draw(sampler, phase), phase)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            state["tokens"] += TOKENS_PER_STEP
            state["seconds"] += time.time() - tick
            for name, value in stats.items():
                smooth[name] = 0.95 * smooth.get(name, value) + 0.05 * value
            if (index + 1) % 20 == 0:
                row = {"phase": phase.name, "step": index + 1, **state, **smooth}
                row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                log.write(json.dumps(row) + "\n")
                log.flush()
            state["step"] = index + 1
            if time.time() - last_save > SAVE_EVERY_S:
                save()
                last_save = time.time()
            if index - begun > 60 and smooth["accuracy"] >= phase.good:
                break
        state["phase"], state["step"] = number + 1, 0
        save()
        torch.save(model.state_dict(), work / f"after-{phase.name}.pt")
    out.mkdir(parents=True, exist_ok=True)
    model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "keys.json").write_text(json.dumps(keys))
    recipe = {"phases": [asdict(p) for p in PHASES], **state}
    (out / "training.json").write_text(json.dumps(recipe, indent=1))


if __name__ == "__main__":
    main()
