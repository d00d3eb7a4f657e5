"""Rewrites: from a model to another one that computes the same."""
