"""Exact match of the final number of a worked answer (GSM8K, Cobbe et al. 2021).

The normalisation is that of the LM Evaluation Harness (`lm_eval/tasks/gsm8k`, MIT): "$", thousands
commas and a full stop at the end do not count. The number is the one after the first "####", as in
GSM8K's solutions ("strict-match"), else the last one ("flexible-extract").
"""

from __future__ import annotations

import re

STRICT = re.compile(r"#### (-?[$0-9.,]*[0-9][0-9.,]*)")
FLEXIBLE = re.compile(r"-?\$?[0-9][0-9.,]*")


def final_number(text: str) -> str | None:
    """The number that `text` ends in, normalised; None without any."""
    strict = STRICT.search(text)
    found = [strict[1]] if strict else FLEXIBLE.findall(text)
    return found[-1].replace(",", "").replace("$", "").removesuffix(".") if found else None


def exact_match(prediction: str, reference: str) -> float:
    """Whether both end in the same number, written the same after normalisation."""
    number = final_number(prediction)
    return float(number is not None and number == final_number(reference))
