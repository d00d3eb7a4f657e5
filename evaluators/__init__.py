"""Evaluators: plans measured on real processors, or predicted."""
