"""Campaigns: a matrix of studies from a file, run one after another or on a cluster, and their results as tables."""
