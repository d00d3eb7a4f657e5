"""All commands but the study itself: what each does, and the function that does it."""

from __future__ import annotations

from collections.abc import Callable

from optimizer.cli.campaigns import pretrain, run, schema, solve
from optimizer.cli.machines import calibrate, devices, doctor, plugins
from optimizer.cli.models import inspect, models, rewrite
from optimizer.cli.parsing import Parser
from optimizer.cli.plans import compare, dashboard, execute, explain, export, report
from optimizer.cli.serving import agent, storage

Work = Callable[[Parser, list[str]], int]

TABLE: dict[str, tuple[str, str, Work]] = {
    "agent": ("measure for others: the device's end of --evaluator remote", "Measure for others, until Ctrl-C.", agent),
    "calibrate": (
        "fit a cost model of this machine's processors",
        "Fit a cost model of this machine's processors, or refine one with what a study measured.",
        calibrate,
    ),
    "compare": (
        "tell which of two runs' plans is faster, and by how much",
        "Tell which of two runs' plans is faster, and by how much.",
        compare,
    ),
    "devices": (
        "list processors here, known devices, phones and agents",
        "List what plans can be searched for: processors here, known devices, phones and agents.",
        devices,
    ),
    "doctor": (
        "tell what this machine offers, and what to do about problems",
        "Tell what this machine offers, and what to do about problems.",
        doctor,
    ),
    "execute": (
        "run a plan, or the plan of a study, and tell its latency",
        "Run a plan from its files and tell its latency. Exit code 4, too, where outputs are not what they should be.",
        execute,
    ),
    "inspect": (
        "tell what a model is made of and where it can be cut",
        "Tell what a model is made of and where it can be cut.",
        inspect,
    ),
    "models": ("list the built-in models", "List the built-in models, with their size and work.", models),
    "dashboard": ("open a study in optuna-dashboard", "Open a finished study in optuna-dashboard.", dashboard),
    "explain": (
        "tell why a study's plan is the best: what changing it would cost, and what binds",
        "Tell why the plan of a study is what it is.",
        explain,
    ),
    "export": (
        "write a study's plan as a folder that runs without this product",
        "Write a study's plan, with runners in Python and C++, as a folder of its own.",
        export,
    ),
    "plugins": (
        "list what is installed beside the built-ins, and what is broken",
        "List evaluators, spaces, samplers and models by where from.",
        plugins,
    ),
    "pretrain": (
        "train a policy for the sampler reinforce on cost models, at no device time",
        "Train a policy for --sampler reinforce@FILE.",
        pretrain,
    ),
    "report": (
        "write what a study or a campaign found, for a browser",
        "Write what a study or a campaign found, for a browser.",
        report,
    ),
    "rewrite": (
        "write a model with operators split, or convolutions decomposed",
        "Write a rewritten model.",
        rewrite,
    ),
    "run": (
        "run a campaign of studies from a YAML file",
        "Run a campaign: a matrix of studies, described in a YAML file.",
        run,
    ),
    "schema": ("print what may stand in a campaign's file", "Print the JSON Schema of campaign files.", schema),
    "storage": (
        "serve a shared study database, for --storage grpc://",
        "Serve a shared study database to many workers, until Ctrl-C.",
        storage,
    ),
    "solve": (
        "prove the best placement of a table of times, or of a published instance",
        "Prove the best placement of a table of times.",
        solve,
    ),
}
"""What each does, in a few words for the list and in a sentence for its own help."""
