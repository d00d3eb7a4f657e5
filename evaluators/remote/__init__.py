"""Plans measured on other machines: an agent there, a session here, models and plans in between and nothing else."""
