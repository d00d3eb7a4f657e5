"""``python -m optimizer.cli``: the same as ``optimize``."""

import sys

from optimizer.cli import main

if __name__ == "__main__":
    sys.exit(main())
