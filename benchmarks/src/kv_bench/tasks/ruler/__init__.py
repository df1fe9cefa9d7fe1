"""RULER's 13 tasks: "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(Hsieh et al. 2024), github.com/NVIDIA/RULER, Apache-2.0.

Prompts are its `scripts/data/synthetic/constants.py`, settings its `scripts/synthetic.yaml`. The
code is ours; what it draws follows the same distributions from other seeds. Differences:

- Each sample fills the length by itself; RULER sizes the haystack once per task.
- Keys, values and variables of a sample differ from each other; RULER leaves that to chance.
- Essays are any prose (`text`), by default the language reference; RULER takes Paul Graham's.
  Sentences end where `kv_integration.haystack` ends them, not where NLTK does.
"""
