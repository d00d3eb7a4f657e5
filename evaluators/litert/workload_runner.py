"""Run several models by a plan from its files: no search and no models needed.

::

    with WorkloadRunner("runs/robot/best") as runner:
        runner.set_inputs("detector 1", [image])
        outcome = runner.run()
        boxes = runner.outputs("detector 1")
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from evaluators.litert import tensors
from evaluators.litert.berth import Arrays, Berth
from evaluators.litert.crew import Crew
from evaluators.litert.deployment import started_for
from evaluators.litert.inner import told_apart
from evaluators.litert.packed import Holder, existing_packed_weights
from evaluators.litert.replay import Replay
from evaluators.litert.workbench import Jobs, Workbench
from evaluators.litert.workload_files import read_workload_plan
from evaluators.workload.lowered import over_before
from evaluators.workload.outcome import Outcome
from search_spaces.errors import UsageError
from search_spaces.platform import Platform
from search_spaces.rewrites.views import as_it_is


class WorkloadRunner:
    """A plan of several models on its lanes, ready to run; close it, or use it in a ``with``.

    A model that crashes, or hangs, fails alone; :attr:`failures` tells of it.

    Args:
        path: a ``plan.json`` or the folder that holds it, as ``optimize`` writes it to ``RUN/best/``.
        log: where the runtime's own messages go; nowhere by default.

    Raises:
        PlanError: the plan or a stage file is missing or damaged.
        UnavailableError: this machine lacks the plan's cores or accelerators, or the runtime refuses a job.
    """

    def __init__(self, path: str | Path, log: Path | None = None) -> None:
        self.files = files = read_workload_plan(Path(path))
        self._closed = False
        self._berths: list[Berth] = []
        with started_for(path):
            self._crew = Crew(files.platform, log)
        self._packed = Holder()
        try:
            bench, numbers = Workbench(self._crew, files.platform), count(1)
            for seat, deployment in zip(files.setting.seats, files.models, strict=True):
                lanes = [[files.setting.lanes[lane] for lane in each] for each in seat.lanes]
                lane = deployment.plan.stages[0].processor
                graph, plan, stages = told_apart(deployment, [(lane, range(len(deployment.plan.stages)))])
                packed = self._packed.hold(existing_packed_weights(deployment.content_digest))
                digest = f"{deployment.content_digest} {deployment.graph.digest}"
                operators = tuple(s.operators for s in plan.stages)
                jobs = Jobs(graph, operators, stages, as_it_is(graph, plan), over_before(seat), digest, packed)
                self._berths.append(Berth(jobs, lanes, files.platform, self._crew, bench, numbers))
            self._replay = Replay(
                files.setting, files.dispatch, self._berths, self._crew, bench, files.platform.limits.run_s
            )
            for berth in self._berths:
                berth.set_inputs(tensors.model_inputs(berth.jobs.graph, 0))
        except BaseException:
            self.close()
            raise

    @property
    def platform(self) -> Platform:
        """The lanes in use."""
        return self.files.platform

    @property
    def names(self) -> tuple[str, ...]:
        """The instances, those first that go first."""
        return self.files.names

    @property
    def failures(self) -> dict[str, str]:
        """The instances that failed, and why."""
        return {self.files.names[seat]: reason for seat, reason in self._replay.failures.items()}

    def set_inputs(self, name: str, arrays: Arrays) -> None:
        """Give an instance the inputs of its requests, one array each, in the model's order.

        Raises:
            UsageError: there is no such instance, or an array does not fit.
        """
        berth = self._berth(name)
        graph = berth.jobs.graph
        wanted = [tensors.shape_and_dtype(graph.tensors[t]) for t in graph.inputs]
        given = [(a.shape, a.dtype) for a in arrays]
        if given != wanted:
            raise UsageError(f"inputs of {name!r} are {given}, the model wants {wanted}")
        berth.set_inputs(arrays)

    def run(self) -> Outcome:
        """Run the workload once: all requests of all instances, as they come.

        Raises:
            UsageError: the runner is closed.
            UnavailableError: no request was answered.
        """
        if self._closed:
            raise UsageError("the runner is closed", "make a new one")
        return self._replay.run()

    def outputs(self, name: str) -> list[NDArray[np.generic]]:
        """Return copies of the outputs of an instance's last request."""
        return self._berth(name).outputs()

    def processes(self) -> list[int]:
        """Return the numbers of the processes of the lanes."""
        return self._crew.processes()

    def _berth(self, name: str) -> Berth:
        if name not in self.files.names:
            raise UsageError(f"there is no instance {name!r}", f"the plan has: {', '.join(self.files.names)}")
        return self._berths[self.files.names.index(name)]

    def close(self) -> None:
        """End the lanes and give the memory back; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for berth in self._berths:
            berth.close()
        self._crew.close()
        self._packed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
