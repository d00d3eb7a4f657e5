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
    "agent": (
        "serve this machine as a device for --evaluator remote",
        "Serve measurements of this machine until Ctrl-C.",
        agent,
    ),
    "calibrate": (
        "fit a cost model of this machine's processors",
        "Fit a cost model of this machine's processors, or refine one with what a study measured.",
        calibrate,
    ),
    "compare": (
        "compare the plans of two runs: which is faster, and by how much",
        "Compare the plans of two runs: which is faster, and by how much.",
        compare,
    ),
    "devices": (
        "list processors of this machine, known devices, phones and agents",
        "List what plans can be searched for: processors of this machine, known devices, phones, agents.",
        devices,
    ),
    "doctor": (
        "check this machine: runtimes, processors, load, and how to fix problems",
        "Check this machine: runtimes, processors, load, and how to fix problems.",
        doctor,
    ),
    "execute": (
        "run a plan, or the plan of a study, and print its latency",
        "Run a plan from its files and print its latency. Exit code 4 if its outputs are wrong.",
        execute,
    ),
    "inspect": (
        "show a model's operators and where it can be cut",
        "Show a model's operators and where it can be cut.",
        inspect,
    ),
    "models": ("list the built-in models", "List the built-in models, with their size and work.", models),
    "dashboard": ("open a study in optuna-dashboard", "Open a finished study in optuna-dashboard.", dashboard),
    "explain": (
        "explain a study's plan: the cost of every change, and which limits cost time",
        "Explain a study's plan: the cost of every change, and which limits cost time.",
        explain,
    ),
    "export": (
        "write a study's plan as a folder that runs without this product",
        "Write a study's plan, with runners in Python and C++, as a folder of its own.",
        export,
    ),
    "plugins": (
        "list installed plug-ins, and which of them fail to load",
        "List evaluators, spaces, samplers and models with the package that brings them.",
        plugins,
    ),
    "pretrain": (
        "train a policy for --sampler reinforce on cost models",
        "Train a policy for --sampler reinforce@FILE on cost models.",
        pretrain,
    ),
    "report": (
        "write the report of a study or campaign as a web page",
        "Write the report of a study or campaign as a web page.",
        report,
    ),
    "rewrite": ("write a model with operators split, or convolutions decomposed", "Write a rewritten model.", rewrite),
    "run": (
        "run a campaign of studies from a YAML file",
        "Run a campaign: a matrix of studies, described in a YAML file.",
        run,
    ),
    "schema": ("print the JSON Schema of campaign files", "Print the JSON Schema of campaign files.", schema),
    "storage": (
        "serve a shared study database, for --storage grpc://",
        "Serve a shared study database to many workers, until Ctrl-C.",
        storage,
    ),
    "solve": (
        "solve a table of times, or a published placement instance, to optimality",
        "Solve a table of times, or a published placement instance, to optimality.",
        solve,
    ),
}
"""What each does, in a few words for the list and in a sentence for its own help."""
