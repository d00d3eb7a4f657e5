"""Commands that neither search nor report: inspect devices and models, run plans, explain and convert."""
