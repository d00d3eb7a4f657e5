"""What a choice costs: evaluators measure plans on real processors, or predict them."""
