"""RULER's two scores (Hsieh et al. 2024; `scripts/eval/synthetic/constants.py`, Apache-2.0).

Both ask whether strings occur in the answer, without regard to case. RULER replaces control
characters of an answer by line breaks first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of `references` that occur in `prediction`."""
    return _found(prediction, references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any of `references` occurs in `prediction`, else 0."""
    return float(_found(prediction, references) > 0)


def _found(prediction: str, references: Sequence[str]) -> int:
    if not references:
        raise ValueError("references must hold at least one text")
    text = CONTROL.sub("\n", prediction.strip()).strip().lower()
    return sum(reference.lower() in text for reference in references)
