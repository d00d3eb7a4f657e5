"""A pickle that leaves a file where it is loaded, as the attributes in which samplers keep their state."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.mark), "w")


def hostile(mark: Path) -> dict[str, Any]:
    """Return attributes of every name under which Optuna's samplers, or one from elsewhere, may look for state."""
    bomb = pickle.dumps(Bomb(mark)).hex()
    names = ("cma:optimizer:0", "sepcma:optimizer:0", "cmawm:optimizer:0", "state", "sampler", "pickle")
    state = {"cma:generation": 0, "nsga3:generation": 0, "constraints": [bomb], "constraints:x": bomb}
    return {
        **dict.fromkeys(names, bomb),
        **state,
        "fixed_params": {"stages": bomb},
        "grid_id": bomb,
        "search_space": {},
    }
