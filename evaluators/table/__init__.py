"""Times from files: published placement instances, and tables of times typed in from a paper."""
