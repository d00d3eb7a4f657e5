"""Studies that several workers share: claims and results, the workers' loop, and the storage."""
