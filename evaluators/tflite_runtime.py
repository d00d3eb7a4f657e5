"""Measure plans with ``tflite-runtime`` instead of LiteRT: the evaluator ``tflite-runtime``.

Processors, isolation and clocks are those of :mod:`evaluators.litert`; only the library that runs the stages differs. A
single processor can use it too, together with processors of LiteRT: ``--processors cpu0,cpu1:tflite-runtime``.
"""

from __future__ import annotations

from evaluators.base import EvaluatorCapabilities
from evaluators.litert.processors import computes_with_xnnpack, local_platform, make_processor
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.worker.runtimes import TFLITE
from search_spaces.core.errors import UsageError
from search_spaces.core.platform import Platform, Processor


class TfliteRuntimeEvaluator(LitertEvaluator):
    """Measures plans by tflite-runtime, LiteRT's predecessor."""

    name = TFLITE
    capabilities = EvaluatorCapabilities(names=True)

    def platform(self) -> Platform:
        """Return the CPU processors of this machine.

        Raises:
            UnavailableError: ``tflite-runtime`` is not installed, or does not work here.
        """
        found = local_platform()
        return Platform(found.name, tuple(self.processor(p.name) for p in found.processors if computes_with_xnnpack(p)))

    def processor(self, name: str) -> Processor:
        """Return the CPU processor of a name, which always uses this runtime, whether its name says so or not."""
        head, *words = name.split(":")
        if not head.startswith("cpu"):
            raise UsageError(f"processor {name!r}: {TFLITE} runs on the CPU alone", "use for example cpu0")
        text = name if TFLITE in words else f"{name}:{TFLITE}"
        found = make_processor(text)
        return Processor(name, found.kind, found.resources, found.like, found.options)
