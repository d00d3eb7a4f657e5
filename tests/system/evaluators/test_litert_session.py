"""A LiteRT study as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evaluators.litert.test_session import SINGLES
from tests.support.commands import SEARCHED

pytestmark = pytest.mark.litert


def test_the_runtime_is_never_loaded_by_the_parent(tmp_path: Path, cache_folder: Path) -> None:
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from optimizer.cli import main\n"
        f"code = main(['--model', 'squeezenet1_1@0.25/64', '--budget', '3', '--max-stages', '2', '-q', '--json',"
        f" '--processors', '{SINGLES[0]}', '--out', sys.argv[1]])\n"
        "maps = Path('/proc/self/maps').read_text()\n"
        "loaded = sorted(m for m in sys.modules if m.startswith('ai_edge_litert.'))\n"
        "print(json.dumps([code, 'pywrap' in maps, loaded]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    # The package itself maps libLiteRt.so when it is imported for its schema; nothing that could call it is loaded.
    code, mapped, loaded = json.loads(run.stdout.splitlines()[-1])
    assert code in SEARCHED
    assert (mapped, loaded) == (False, ["ai_edge_litert.schema_py_generated"])
