"""What is done with the runs of loaded plans: sampling, racing, comparison, the final, and what disturbed them."""
