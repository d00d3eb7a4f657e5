"""Value ranges of a float model's tensors, from runs in a separate process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SEEDS = (0, 1)  # of the inputs, uniform in [-1, 1)

TINY = 1e-30

Range = tuple[float, float]


def calibrated(path: Path) -> Mapping[int, Range]:
    """Return tensor index → the smallest and the largest value of each float32 activation of a model.

    Limits are rounded outward to three digits, so that machines that round sums differently agree. Takes seconds.

    Raises:
        UnavailableError: the runtime does not run the model here.
    """
    from search_spaces.core.errors import UnavailableError  # the child runs this file alone, without the package

    command = [sys.executable, "-P", __file__, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UnavailableError(f"the runtime cannot calibrate {path.name}: {last}", "take the float32 model or :f16")
    found = json.loads(done.stdout.splitlines()[-1])
    if not all(math.isfinite(value) for seen in found.values() for value in seen):
        raise UnavailableError(f"{path.name} computes numbers that are not finite", "take the float32 model")
    return {int(index): (_outward(low), _outward(high)) for index, (low, high) in found.items()}


def _outward(value: float) -> float:
    if abs(value) < TINY:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return math.copysign(math.ceil(abs(value) / unit) * unit, value)


def _observe(path: str) -> dict[int, Range]:
    """Run the model on each seed's input, and return the range of every float32 tensor that it computes."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    interpreter = Interpreter(
        path,
        experimental_preserve_all_tensors=True,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    interpreter.allocate_tensors()
    inputs = interpreter.get_input_details()
    computed = {int(i) for o in interpreter._get_ops_details() for i in o["outputs"]}  # noqa: SLF001 - no public way
    computed |= {i["index"] for i in inputs}
    floats = [
        t["index"] for t in interpreter.get_tensor_details() if t["index"] in computed and t["dtype"] == np.float32
    ]
    ranges: dict[int, Range] = {}
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        for tensor in inputs:
            interpreter.set_tensor(tensor["index"], random.uniform(-1, 1, tensor["shape"]).astype(tensor["dtype"]))
        interpreter.invoke()
        for index in floats:
            values = interpreter.get_tensor(index)
            low, high = ranges.get(index, (math.inf, -math.inf))
            ranges[index] = min(low, float(values.min())), max(high, float(values.max()))
    return ranges


if __name__ == "__main__":
    print(json.dumps(_observe(sys.argv[1])))  # noqa: T201 - the parent process reads it
