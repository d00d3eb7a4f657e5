"""Plans measured on other machines: an agent there, a session here; only models and plans are sent."""
