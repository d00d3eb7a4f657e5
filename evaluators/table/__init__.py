"""Times from elsewhere: published placement instances, and tables of times that a person types in."""
