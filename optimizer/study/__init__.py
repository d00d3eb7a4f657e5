"""A study: settings, loop, trial log, verdict and result."""
