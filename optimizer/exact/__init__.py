"""Solvers that are exact on a model of what plans cost."""
