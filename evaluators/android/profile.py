"""What ``benchmark_model`` tells of a run: its profile as a protobuf, by the definitions that LiteRT's wheel brings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from search_spaces.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class StageProfile:
    """Where the time of a stage went, on average over the runs of one process.

    Attributes:
        operators: name of each node in the order of execution, and its seconds in one run.
    """

    operators: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        """The stage's time, all nodes together."""
        return math.fsum(seconds for _, seconds in self.operators)


def read_profile(content: bytes) -> StageProfile:
    """Read the file that ``--op_profiling_output_file`` named.

    Raises:
        UnavailableError: it is no profile, or tells of no run.
    """
    from ai_edge_litert.profiling_info_pb2 import BenchmarkProfilingData
    from google.protobuf.message import DecodeError

    data = BenchmarkProfilingData()
    try:
        data.ParseFromString(content)
    except DecodeError as error:
        raise UnavailableError(
            "benchmark_model wrote no readable profile", "use the benchmark_model of LiteRT"
        ) from error
    found: list[tuple[int, str, float]] = []
    for subgraph in data.runtime_profile.subgraph_profiles:
        if subgraph.subgraph_index:
            continue  # what is called from the main one counts there
        for node in subgraph.per_op_profiles:
            stat = node.inference_microseconds
            mean_us = stat.sum / stat.count if stat.count else float(stat.avg)
            found.append((int(node.run_order), str(node.name or node.node_type), max(mean_us, 0.0) * 1e-6))
    profile = StageProfile(tuple((name, seconds) for _, name, seconds in sorted(found)))
    if not profile.operators or not profile.seconds > 0.0:
        raise UnavailableError("benchmark_model wrote a profile without a run", "see its flags, and whether it crashed")
    return profile
