"""Predicts what a plan costs from what its operators compute and move, and from how a device's kernels were fitted."""
