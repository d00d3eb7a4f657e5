"""Workloads: the law by which jobs of several models go from one queue to lanes, and what comes of it."""
