"""Predicts the costs of plans from their operators' work and traffic, by fitted models of a device's kernels."""
