"""Graphics adapters fall asleep: a plan is measured once its adapter is as fast as it gets under load.

An NVIDIA H200 that idled for about a second lowers its clock and is then three times slower (ResNet50 11.0 ms instead
of 3.4). It takes 0.25 to 0.5 s of load until it is awake, more if the load is light, and compiling a stage, which can
take seconds, is no load. Latencies taken meanwhile would say when a plan was measured rather than how good it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

from search_spaces.platform import Processor

IDLE_S = 0.3
"""An adapter that did nothing for so long may be about to fall asleep."""
STEADY_S = 0.4
"""It is awake when it has not become faster for so long."""
MOST_S = 3.0
_WINDOW_S = 0.05
_FASTER = 0.97  # by less than this, latencies differ by chance

_busy_until_s: dict[str, float] = {}


def sleepers(processors: Iterable[Processor]) -> tuple[str, ...]:
    """Return the adapters among some processors that fall asleep; those in software compute on the CPU."""
    gpus = (p for p in processors if p.kind == "gpu" and not p.options.get("software"))
    return tuple(dict.fromkeys(str(p.options["adapter"]) for p in gpus))


def wake(adapters: Iterable[str], run: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> int:
    """Run until all of some adapters are awake, and return how many runs that took: none if they were busy just now.

    Args:
        run: makes a run and returns its latency in seconds.
    """
    begin = clock()
    if all(begin - _busy_until_s.get(name, -IDLE_S) < IDLE_S for name in adapters):
        return 0
    count, best_s, best_at = 0, float("inf"), begin
    now = begin
    while now - best_at < STEADY_S and now - begin < MOST_S:
        window: list[float] = []
        until = now + _WINDOW_S
        while not window or now < until:
            window.append(run())
            now = clock()
        count += len(window)
        median_s = statistics.median(window)
        if median_s < _FASTER * best_s:
            best_s, best_at = median_s, now
    return count


def were_busy(adapters: Iterable[str], clock: Callable[[], float] = time.perf_counter) -> None:
    """Note that some adapters have just finished work."""
    now = clock()
    _busy_until_s.update(dict.fromkeys(adapters, now))
