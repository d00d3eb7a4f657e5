"""Which way to compute a convolution is the quickest on this GPU: found by timing, while other streams are busy or not.

A way that fails, or is further off the ordinary call than the precision explains, is not taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from evaluators.cuda.kernels import PLAIN, Call, Conv, Dense
from evaluators.cuda.settings import torch_module

_REPEATS, _ROUNDS = 6, 3
_OFF = 2e-2  # relative to the largest value, of TF32 against TF32


class Tuning:
    """Chooses, and remembers what it chose.

    Args:
        precision: part of what choices depend on.
        busy: how many streams compute the same at once while a way is timed.
        known: signature → way, of an earlier session on this device.
    """

    def __init__(self, precision: str, busy: int, known: Mapping[str, str] | None = None) -> None:
        self._key = f"{precision} x{busy} "
        self._busy = max(1, busy)
        self._streams: list[Any] = []
        self.chosen: dict[str, str] = dict(known or {})
        self.times_s: dict[str, dict[str, float]] = {}
        """Signature → way → seconds, of what was timed here."""

    def __call__(self, site: Conv | Dense) -> str:
        """Return the quickest way; see :data:`~evaluators.cuda.lowering.Choose`."""
        key = self._key + site.signature
        ways = site.variants(gpu=True)
        if self.chosen.get(key) in ways:
            return self.chosen[key]
        times = self._timed(site, ways)
        self.times_s[key] = times
        self.chosen[key] = min(times, key=lambda way: times[way]) if times else PLAIN
        return self.chosen[key]

    def _timed(self, site: Conv | Dense, ways: Mapping[str, Call]) -> dict[str, float]:
        given = _example(site)
        wanted = ways[PLAIN](*given)
        largest = float(wanted.abs().max())
        times: dict[str, float] = {}
        for name, call in ways.items():
            try:
                off = float((call(*given) - wanted).abs().max())
                if not off <= _OFF * max(largest, 1e-30):
                    continue
                times[name] = self._seconds(lambda call=call: call(*given))  # type: ignore[misc]
            except Exception:  # noqa: BLE001, S112 - PyTorch's or Triton's way to say that there is no such kernel
                continue
        return times

    def _seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one call, of several streams that make it at once."""
        torch = torch_module()
        streams = self._streams = self._streams or [torch.cuda.Stream() for _ in range(self._busy)]
        graphs = []
        for stream in streams:
            warm(stream, call)
            graphs.append(captured(stream, lambda: [call() for _ in range(_REPEATS)]))
        found = []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(2):
                for stream, graph in zip(streams, graphs, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - begin) / (2 * _REPEATS * self._busy))
        return min(found)


def warm(stream: Any, call: Callable[[], Any], times: int = 1) -> None:
    """Run something on a stream before it is captured, so that libraries load and look for their kernels."""
    torch = torch_module()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def captured(stream: Any, call: Callable[[], Any], pool: Any = None) -> Any:
    """Return what a function launches as a CUDA graph; the function must have run on this stream before.

    PyTorch's own context manager empties the cache of memory each time, which takes as long as all else.

    Args:
        pool: of memory, of :func:`torch.cuda.graph_pool_handle`.
    """
    torch = torch_module()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def _example(site: Conv | Dense) -> tuple[Any, ...]:
    """Return data for one call: an image, and what is added to what comes of it; or vectors."""
    torch = torch_module()
    device = site.weight.device
    if isinstance(site, Dense):
        return (torch.randn((site.rows, site.weight.shape[1]), device=device),)
    image = torch.randn(site.image, device=device).contiguous(memory_format=torch.channels_last)
    if not site.adds:
        return (image,)
    shape = (site.image[0], site.weight.shape[0], *site.output)
    return image, torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)
