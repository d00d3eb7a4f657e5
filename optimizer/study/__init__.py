"""A study: its settings, its course, its log, and how it ends."""
