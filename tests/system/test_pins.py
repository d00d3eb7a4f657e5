"""What the code computes is what was recorded, or its difference is explained; see the README beside this file."""

from __future__ import annotations

import json

from tests.pins.pins import FILE, differences, unexplained


def test_what_was_recorded_still_holds() -> None:
    found = list(differences(json.loads(FILE.read_text()), quick=True))
    assert not unexplained(found, quick=True)
