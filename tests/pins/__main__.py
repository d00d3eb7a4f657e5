"""``python -m tests.pins record | refresh | check``; see the README beside this file."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter

from tests.pins.pins import FILE, differences, record, text, unexplained


def main() -> int:
    """Record or check all pins; return 1 where a difference is not explained."""
    parser = argparse.ArgumentParser(prog="python -m tests.pins", description=__doc__)
    parser.add_argument("what", choices=("record", "refresh", "check"))
    what = parser.parse_args().what
    logging.getLogger("partition_optimizer").setLevel(logging.ERROR)  # what a profile only guesses is no matter here
    begin_s = time.monotonic()
    old = json.loads(FILE.read_text()) if what != "record" else None
    if old is None or what == "refresh":
        FILE.write_text(text(record(old)))
        sys.stdout.write(f"{FILE}: {FILE.stat().st_size} bytes, {time.monotonic() - begin_s:.0f} s\n")
        return 0
    found = list(differences(old, quick=False))
    for kind, count in sorted(Counter(each.kind for each in found).items()):
        sys.stdout.write(f"{count:4} {kind}\n")
    wrong = unexplained(found, quick=False)
    sys.stdout.write("".join(f"not explained: {line}\n" for line in wrong))
    sys.stdout.write(f"{len(found)} differences, {time.monotonic() - begin_s:.0f} s\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
