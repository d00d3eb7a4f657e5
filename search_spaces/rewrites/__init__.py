"""Rewrites of models: splits of operators, decomposed convolutions, and plans lowered to what runs."""
