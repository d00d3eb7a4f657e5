"""Exact methods for graphs with branches: placements of operators, and segments between gates."""
