"""``optimize run``: read the file, run what is not finished, write tables and report, print the summary."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.campaign import code_of, plan_studies
from optimizer.campaign_console import ProgressCampaign, dry_run, render_dry_run, render_summary
from optimizer.campaign_file import read_campaign
from optimizer.campaign_run import CampaignRun, State, is_finished, opened, run_campaign
from optimizer.campaign_table import Tables, gather, write_tables
from optimizer.console import make_console
from optimizer.files import write_json
from optimizer.report.campaign import mean_excess, read_state
from optimizer.report.write import report
from search_spaces.allowed_code import allow
from search_spaces.errors import EXIT_INTERRUPTED

_AT = (10, 25, 50, 100, 200)


def summary_json(saved: Mapping[str, Any], tables: Tables, path: Path) -> dict[str, Any]:
    """Return the small document that is worth keeping of a campaign: who made it, and what came out."""
    kept = ("schema_version", "name", "description", "created_utc", "product", "python", "packages", "machine")
    return {
        **{name: saved.get(name) for name in kept},
        "command": shlex.join(["optimize", "run", str(path)]),
        "failed": {s["name"]: s["error"] for s in saved["studies"] if s["status"] == "failed"},
        "summary": tables.summary,
        "expected": tables.expected,
        "explained": tables.explained,
        "mean_excess": {
            sampler: {n: curve[min(n, len(curve)) - 1] for n in _AT if n <= len(curve)}
            for sampler, curve in mean_excess(tables.curves).items()
        },
    }


def run_file(
    path: Path,
    out: Path | None,
    jobs: int,
    command: Sequence[str],
    *,
    dry: bool,
    as_json: bool,
    quiet: bool,
    scheduler: str = "",
    allow_code: bool = False,
) -> int:
    """Run a campaign from its file and return the exit code.

    Args:
        allow_code: whether what the file names may be loaded: samplers as ``module:Class``, folders of libraries.

    Raises:
        UsageError: the file or an option is wrong.
        RunFolderError: the campaign's folder cannot be used.
    """
    file = read_campaign(path)
    if allow_code:
        allow(*code_of(file.campaign))
    studies = plan_studies(file)
    folder = out or Path("runs", file.campaign.name)
    if dry:
        planned = CampaignRun(file, folder, [State(p) for p in studies], command)
        for state in planned.states:
            state.status = "done" if is_finished(planned.path(state.planned)) else "pending"
        document = dry_run(planned)
        if as_json:
            print(json.dumps(document, indent=2))
        else:
            make_console().print(render_dry_run(document), crop=False)
        return 0
    with opened(file, studies, folder, command) as run:
        with ProgressCampaign(len(studies), quiet=quiet) as watcher:
            run_campaign(run, watcher, jobs, scheduler)
        saved = read_state(folder)
        tables = gather(folder, saved)
        notes = [write_tables(tables, folder)]
        write_json(folder / "summary.json", summary_json(saved, tables, path))
        written = report(folder)
        notes.append(written.without_png)
    if as_json:
        rows = {name: getattr(tables, name) for name in ("results", "summary", "expected", "indicators", "explained")}
        print(json.dumps({**saved, **rows}, indent=2))
    else:
        make_console().print(render_summary(run, tables), crop=False)
        print(written.page)
    for note in filter(None, notes):
        print(f"optimize: {note}", file=sys.stderr)
    if run.interrupted:
        print(f"optimize: interrupted; resume with: {shlex.join(command)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return run.exit_code
