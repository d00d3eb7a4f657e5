"""Exact methods for graphs that are no chain: placements of operators, and segments between gates."""
