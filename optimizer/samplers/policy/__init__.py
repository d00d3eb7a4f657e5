"""The policy-gradient sampler: its network, its features, its training."""
