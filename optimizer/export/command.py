"""``optimize export``: its options, and what it tells."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def export(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize export``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished study")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write (default: RUN/export)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    from optimizer.export.folder import export_run

    found = export_run(options.run, options.out or options.run / "export")
    if options.json:
        fallback = None if found.fallback is None else {"processor": found.fallback}
        print(
            json.dumps({"schema_version": 1, "folder": str(found.folder), "files": found.files, "fallback": fallback})
        )
        return 0
    print(f"{found.folder}: {', '.join(found.files)}")
    print(f"time it with: python {found.folder / 'run_plan.py'}")
    if found.fallback is not None:
        print(f"compare it with the whole model on {found.fallback}: add --fallback")
    return 0
