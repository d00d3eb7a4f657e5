"""``optimize run``: read the file, run what is not finished, write tables and report, print the summary."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from optimizer.campaign import plan_studies
from optimizer.campaign_console import ProgressCampaign, dry_run, render_dry_run, render_summary
from optimizer.campaign_file import read_campaign
from optimizer.campaign_run import CampaignRun, State, is_finished, opened, run_campaign
from optimizer.campaign_table import gather, write_tables
from optimizer.console import make_console
from optimizer.report.campaign import read_state
from optimizer.report.write import report
from search_spaces.errors import EXIT_INTERRUPTED


def run_file(
    path: Path, out: Path | None, jobs: int, command: Sequence[str], *, dry: bool, as_json: bool, quiet: bool
) -> int:
    """Run a campaign from its file and return the exit code.

    Raises:
        UsageError: the file or an option is wrong.
        RunFolderError: the campaign's folder cannot be used.
    """
    file = read_campaign(path)
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
            run_campaign(run, watcher, jobs)
        saved = read_state(folder)
        tables = gather(folder, saved)
        notes = [write_tables(tables, folder)]
        written = report(folder)
        notes.append(written.without_png)
    if as_json:
        rows = {"results": tables.results, "summary": tables.summary, "expected": tables.expected}
        print(json.dumps({**saved, **rows}, indent=2))
    else:
        make_console().print(render_summary(run, tables), crop=False)
        print(written.page)
    for note in filter(None, notes):
        print(f"optimize: {note}", file=sys.stderr)
    if run.interrupted:
        print(f"optimize: interrupted; go on with: {shlex.join(command)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return run.exit_code
