"""A board that is reached by a shell command. Copy this package, change platform and command, and it is your board's.

The command in ``EXAMPLE_BOARD`` is started for each plan as ``COMMAND FOLDER``; the folder holds ``plan.json`` and a
``.tflite`` file per stage. For each line ``RUNS LIMIT_S`` on its standard input it runs the plan so many times, ends
early with a run that takes longer than the limit, and prints, as one line of JSON, ``{"latency_s": [of each run],
"stage_s": [[of each stage] of each run]}``; for the line ``outputs``, ``{"outputs": [[values] of each output]}`` of its
last run. :mod:`example_evaluator.board` answers so. It runs here by default, and on a board that is reached by SSH with
``EXAMPLE_BOARD="sh …/example_evaluator/by_ssh.sh pi@board"``.
"""

import json
import math
import os
import shlex
import sys
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np

from evaluators.base import Batch, Capabilities
from evaluators.litert.deployment import write_deployment
from evaluators.litert.tensors import agreement
from search_spaces.core.errors import UnavailableError
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import chain_plan

COMMAND = os.environ.get("EXAMPLE_BOARD", f"{shlex.quote(sys.executable)} -m example_evaluator.board")


class BoardEvaluator:
    name, contract_version = "example", 1

    def platform(self):
        kinds = (("cpu", "cpu"), ("dsp", "npu"))  # they share one memory; here they take turns
        return Platform("example", tuple(Processor(p, kind, {"board": 1.0}, like=p) for p, kind in kinds))

    @contextmanager
    def prepare(self, platform, scratch=None):
        with TemporaryDirectory() as folder, ExitStack() as stack:
            yield BoardSession(platform, Path(folder), stack)


class BoardSession:
    capabilities = Capabilities(deploy=True, outputs=True)  # verify() compares them

    def __init__(self, platform, folder, stack):
        self.platform, self.folder, self.stack = platform, folder, stack

    def fingerprint(self):
        return {"evaluator": "example 0.1", "command": COMMAND, "platform": self.platform.to_json()}

    def load(self, graph, plan, *, fresh=False):
        if graph.source is None or not self.folder.is_dir():
            raise UnavailableError("the model has no file, or the session is closed")
        return self.on_board(Path(mkdtemp(dir=self.folder)), graph, plan)

    def on_board(self, folder, graph, plan):
        write_deployment(folder, graph, plan, self.platform, graph.source.content_digest())
        return self.stack.enter_context(closing(BoardPlan(self, graph, folder)))

    def deploy(self, folder, graph, plan):
        return self.on_board(folder, graph, plan).verify()


class BoardPlan:
    def __init__(self, session, graph, folder):
        self.session, self.graph, self.folder = session, graph, folder
        with (folder / "errors.txt").open("wb") as said:
            self.board = Popen([*shlex.split(COMMAND), str(folder)], stdin=PIPE, stdout=PIPE, stderr=said, text=True)

    def ask(self, line):
        try:  # a board that does not answer in time is given up on by whoever called
            print(line, file=self.board.stdin, flush=True)
            return json.loads(self.board.stdout.readline())
        except (OSError, ValueError) as error:
            said = (self.folder / "errors.txt").read_text().strip().rpartition("\n")[2] or "it printed no reason"
            raise UnavailableError(f"the board does not answer: {said}", f"the command is {COMMAND}") from error

    def run(self, n, stop_above_s=math.inf):
        answer = self.ask(f"{n} {stop_above_s}")
        return Batch(np.array(answer["latency_s"]), np.array(answer["stage_s"]))

    def outputs(self):
        self.run(1)
        return [np.array(values, np.float32) for values in self.ask("outputs")["outputs"]]

    def verify(self):
        plan = chain_plan(self.graph, (), [self.session.platform.processors[0].name])
        with closing(self.session.load(self.graph, plan)) as whole:  # 1e-3: unlike kernels round differently
            return agreement(self.graph, self.outputs(), whole.outputs(), 1e-3)

    def close(self):
        self.board.kill()
        self.board.communicate()
