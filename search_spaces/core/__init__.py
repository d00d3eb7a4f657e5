"""Networks, plans, platforms and workloads, and the errors, files and wording that the whole product shares."""
