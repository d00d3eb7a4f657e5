"""A study's plan as a folder that runs without the product (:mod:`optimizer.export.folder`)."""
