"""Measurement of loaded plans: the final comparison, drift, disturbances and foreground priority."""
