"""Campaigns: a matrix of studies from a file, run one after another or on a cluster, and what came out as tables."""
