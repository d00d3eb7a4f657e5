"""How much memory this machine has left, and whether a model's tensors fit into it."""

from __future__ import annotations

from pathlib import Path

from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph

_COPIES = 3  # in shared memory, within the runtime, and as arrays of ours


def available_nbytes() -> int | None:
    """Return the bytes that can be had without swapping, or None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def check_fits(graph: Graph) -> None:
    """Check that a model's activations fit into memory; the system would kill whoever asks for more.

    Raises:
        UnavailableError: they do not.
    """
    unfolded = graph.source.recipes if graph.source else ()  # constants that the runtime computes
    largest = sum(graph.tensors[t].nbytes for t in (*graph.activation_tensors, *unfolded))
    available = available_nbytes()
    if available is not None and _COPIES * largest > available:
        raise UnavailableError(
            f"the activations of {graph.name!r} take {largest / 1e9:.1f} GB, and {_COPIES} times that must be free; "
            f"this machine has {available / 1e9:.1f} GB",
            "use a smaller input",
        )
