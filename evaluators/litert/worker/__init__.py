"""What runs in a worker process: the runtimes, and a processor's share of a plan."""
