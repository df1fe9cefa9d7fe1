"""A byte-level BPE whose merges start with all three-digit numbers, with and without a space.

A six-digit number is then two tokens (" 482", "913"), which a small model can copy; the rest of the
vocabulary is ordinary BPE trained on prose.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACE = "\u0120"  # how the byte-level alphabet writes a space
CHAT_TEMPLATE = (
    "{% if messages %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|> ' + message['content'] + eos_token }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Words with their space, numbers three digits at a time, punctuation, white space; bytes."""
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def number_merges() -> list[tuple[str, str]]:
    """Merges that make every three-digit number one token, whichever pair is merged first."""
    digits = "0123456789"
    pairs = [(a, b) for a in digits for b in digits]
    triples = [(a + b, c) for a in digits for b in digits for c in digits]
    triples += [(a, b + c) for a in digits for b in digits for c in digits]
    spaced = [(SPACE, f"{n:03d}") for n in range(1000)]
    return pairs + triples + spaced


def train_tokenizer(texts: Iterable[str], prose_vocab: int) -> PreTrainedTokenizerFast:
    """Train on `texts` (digits left out) to `prose_vocab` entries, then add the numbers."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=prose_vocab,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator((re.sub(r"\d", "", text) for text in texts), trainer)
    learned = json.loads(learner.to_str())["model"]
    learned_merges = [tuple(pair) for pair in learned["merges"]]
    merges = number_merges() + learned_merges
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([BOS, EOS, PAD, USER, ASSISTANT, *alphabet])
    tokens.update(dict.fromkeys(a + b for a, b in merges))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def key_words(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], count: int) -> list[str]:
    """The `count` most common lower-case words of four letters or more that are one token."""
    frequency = Counter(word for text in texts for word in re.findall(r"\b[a-z]{4,}\b", text))
    vocab = tokenizer.get_vocab()
    return [word for word, _ in frequency.most_common() if SPACE + word in vocab][:count]
