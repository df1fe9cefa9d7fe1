"""Scores of answers, in [0, 1], each as the benchmark that uses it defines it."""
