"""Whether a model's tensors fit into the memory that is left."""

from __future__ import annotations

from evaluators.machine import available_nbytes
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph

__all__ = ["available_nbytes", "check_fits"]

_COPIES = 3  # in shared memory, within the runtime, and as arrays of ours


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
            f"this process can have {available / 1e9:.1f} GB",
            "use a smaller input, or give the container more memory",
        )
