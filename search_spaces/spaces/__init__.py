"""Which plans are searched: cuts, branches, splits and ranks, of one model and of several."""
