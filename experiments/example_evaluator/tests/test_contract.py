"""The examples keep the contract of evaluators; this is all that a plug-in's own tests need."""

from __future__ import annotations

from evaluators.base import Evaluator
from evaluators.registry import make_evaluator
from evaluators.testing import EvaluatorContract
from search_spaces.core.graph import Graph
from search_spaces.models import load


class TestExample(EvaluatorContract):
    measures = True
    call_s = 5.0  # an interpreter starts, imports the runtime, and loads the plan

    def evaluator(self) -> Evaluator:
        return make_evaluator("example")

    def graph(self) -> Graph:
        return load("squeezenet1_1@0.25/64")


class TestExampleTool(EvaluatorContract):
    measures = False  # without EXAMPLE_TOOL; True with a tool that times, with call_s

    def evaluator(self) -> Evaluator:
        return make_evaluator("example-tool")

    def graph(self) -> Graph:
        return load("squeezenet1_1@0.25/64")
