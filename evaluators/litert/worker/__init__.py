"""Worker process: the runtimes, and a processor's share of a plan."""
