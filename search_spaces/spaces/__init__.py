"""Search spaces: cuts, branches, splits and ranks, of one model and of several."""
