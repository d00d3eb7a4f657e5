"""Studies that several workers share: who measures what, their loop, and the storage between them."""
