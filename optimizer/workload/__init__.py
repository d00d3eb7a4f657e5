"""Studies of several models: problem, baselines, limits, decomposed variants, and search."""
