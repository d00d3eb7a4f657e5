"""The model estimate of a study: predictions, optima, bounds and baselines, for each space and objective."""
