"""Search spaces: models as graphs, cut points, processors, plans, and the spaces they span."""
