"""Workloads of several models: the job scheduler, simulated and measured, and the outcomes of runs."""
