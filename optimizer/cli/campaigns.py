"""Commands for experiments: campaigns, their schema, exact placements, policies."""

from __future__ import annotations

import json
from pathlib import Path

from optimizer.cli.parsing import Parser, show


def run(parser: Parser, arguments: list[str]) -> int:
    """Run a campaign: a matrix of studies, described in a YAML file."""
    add = parser.add_argument
    add("file", metavar="FILE.yaml", type=Path, help="the campaign")
    add("--out", metavar="DIR", type=Path, help="folder of the campaign (default runs/NAME)")
    add("--jobs", metavar="N", help="studies at a time, where none measures this machine (default 1)")
    add("--scheduler", metavar="URL", default="", help="a Dask cluster that runs the studies (default: this machine)")
    add("--allow-code", action="store_true", help="let the file load samplers and libraries; for files that you trust")
    add("--dry-run", action="store_true", help="list the studies with their sizes and expected time")
    options = parser.read(arguments, quiet=True)
    if options.jobs is not None and options.scheduler:
        parser.error("--jobs has no effect with --scheduler")
    options.jobs = parser.whole("--jobs", options.jobs or "1", 1, 1024)
    from optimizer.campaign.run import run_file

    return run_file(options, ["optimize", "run", *arguments])


def schema(parser: Parser, arguments: list[str]) -> None:
    """Print the JSON Schema of campaign files."""
    parser.add_argument("--markdown", action="store_true", help="print a reference page instead of the JSON Schema")
    options = parser.read(arguments, as_json=False)
    from optimizer.campaign.file import json_schema, reference
    from optimizer.campaign.table import columns_reference

    text = f"{reference()}\n{columns_reference()}"
    print(text if options.markdown else json.dumps(json_schema(), indent=2, ensure_ascii=False))


def solve(parser: Parser, arguments: list[str]) -> None:
    """Solve a table of times, or a published placement instance, to optimality."""
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="a table of times (YAML), or a published placement instance (JSON)")
    add("--objective", metavar="NAME", help="latency or period, the load of the busiest device (default: the file's)")
    add("--time-limit", metavar="S", type=float, default=30.0, help="seconds to search and prove (default 30)")
    options = parser.read(arguments)
    from optimizer.tools.solve import render, solve_file

    found = solve_file(options.file, options.objective, options.time_limit)
    show(options, found.to_json, lambda: render(found))


def pretrain(parser: Parser, arguments: list[str]) -> None:
    """Train a policy for --sampler reinforce@FILE on cost models."""
    add = parser.add_argument
    add("--model", metavar="NAME|FILE", action="append", required=True, help="to train on; may be given several times")
    devices = "a device's profile, a file or a name; may be given several times"
    add("--platform", metavar="FILE|NAME", type=Path, action="append", required=True, help=devices)
    add("--out", metavar="FILE", type=Path, required=True, help="the policy, a .npz file")
    add("--max-stages", metavar="K", type=int, default=4, help="stages of a plan at most (default 4)")
    batches = "batches of plans to draw (default 40 per model and device)"
    add("--batches", metavar="N", type=int, default=0, help=batches)
    add("--seed", metavar="S", type=int, default=0, help="the same seed gives the same policy (default 0)")
    o = parser.read(arguments)
    if o.seed < 0:
        parser.error(f"--seed {o.seed}: must be 0 or more")
    from optimizer.samplers.policy.pretrain import render, train

    found = train(o.model, o.platform, o.out, max_stages=o.max_stages, batches=o.batches, seed=o.seed)
    show(o, found.to_json, lambda: render(found))
