"""Measurement of loaded plans: sampling, racing, comparison, the final, and disturbances."""
