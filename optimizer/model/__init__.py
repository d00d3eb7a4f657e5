"""What a study believes of plans before it measures them, for each kind of space and objective."""
