"""What the commands do that neither search nor report: look at devices and models, run plans, explain and convert."""
