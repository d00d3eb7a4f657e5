"""A study's plan as a folder that runs without the product; see :mod:`optimizer.export.folder`."""
