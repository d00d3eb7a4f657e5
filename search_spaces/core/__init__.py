"""Networks, plans, platforms and workloads, and what all of the product reads and says."""
