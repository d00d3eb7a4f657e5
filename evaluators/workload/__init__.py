"""Workloads: the law by which jobs of several models go from one queue to processors, and what comes of it."""
