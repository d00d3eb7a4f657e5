"""A board with a tool of its own, which is given a processor and a ``.tflite`` file and prints milliseconds.

``EXAMPLE_TOOL PROCESSOR FILE`` is started for each run of each stage; its first word of output is the figure. Without
that variable each stage takes 1 ms. By SSH: ``EXAMPLE_TOOL="sh …/example_evaluator/tool_by_ssh.sh pi@board ./bench"``.
"""

import math
import os
import shlex
import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np

from evaluators.base import Batch, EvaluatorCapabilities
from evaluators.litert.deployment import write_deployment
from search_spaces.core.errors import UnavailableError
from search_spaces.core.platform import Limits, Platform, Processor

TOOL = os.environ.get("EXAMPLE_TOOL", "echo 1.0")


class ToolEvaluator:
    name, contract_version = "example-tool", 1
    capabilities = EvaluatorCapabilities(measures_here=False)

    def platform(self):  # one file is timed at a time: both processors hold the resource "board"
        kinds = (("cpu", "cpu"), ("dsp", "npu"))
        processors = tuple(Processor(p, kind, {"board": 1.0}, like=p) for p, kind in kinds)
        return Platform("example tool", processors, limits=Limits(run_s=120))

    @contextmanager
    def prepare(self, platform, scratch=None):
        with TemporaryDirectory() as folder:
            yield ToolSession(platform, Path(folder))


class ToolSession:
    def __init__(self, platform, folder):
        self.platform, self.folder = platform, folder

    def fingerprint(self):
        return {"evaluator": "example-tool 0.1", "command": TOOL, "platform": self.platform.to_json()}

    def load(self, graph, plan, *, fresh=False):
        if graph.source is None or not self.folder.is_dir():
            raise UnavailableError("the model has no file, or the session is closed")
        folder = Path(mkdtemp(dir=self.folder))
        write_deployment(folder, graph, plan, self.platform, graph.source.content_digest())
        files = enumerate(plan.stages)
        return ToolPlan([[*shlex.split(TOOL), s.processor, str(folder / f"stage_{i}.tflite")] for i, s in files])


class ToolPlan:
    def __init__(self, commands):
        self.commands = commands

    def time_s(self, command):
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # ended where a limit interrupts it
        try:
            return float(done.stdout.split()[0] if done.returncode == 0 else "") / 1e3
        except (IndexError, ValueError) as error:
            said = (done.stderr.strip() or done.stdout.strip())[-200:]
            raise UnavailableError(f"the tool printed no time but {said!r}", shlex.join(command)) from error

    def run(self, n, stop_above_s=math.inf):
        rows = []  # seconds of each stage, of each run
        while len(rows) < n and not (rows and sum(rows[-1]) > stop_above_s):
            rows.append([self.time_s(command) for command in self.commands])
        return Batch(np.sum(rows, axis=1), np.array(rows))

    def verify(self):  # the tool shows no outputs
        return None

    def close(self):
        pass
