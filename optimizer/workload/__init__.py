"""Studies of several models: what they are about, what limits them, where their search begins."""
