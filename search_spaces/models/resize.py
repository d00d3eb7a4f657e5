"""Process that runs a model on inputs and reports the shape of every tensor, or why it fails.

This file, run alone, reads one JSON document from stdin (``path``; ``shapes``: position of an input → its shape;
``tensors``: how many there are; ``values`` and ``ranges``: those whose values are wanted, or the least and the greatest
one; ``inputs``: bytes of each in hexadecimal, or null for zeros) and writes one to stdout: ``shapes`` of the main
subgraph's tensors after a run, ``values`` (tensor → bytes in hexadecimal), and ``ranges``; or ``error``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_LIMIT_S = 120.0


def answer_of(question: Mapping[str, Any]) -> Any:
    """Return the answer of a process of its own, or an ``error`` where it has none."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=json.dumps(question).encode(),
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_LIMIT_S:.0f} s"}
    return json.loads(done.stdout) if done.returncode == 0 else {"error": f"it ended with {done.returncode}"}


def main() -> None:
    """Answer the JSON document on stdin."""
    question = json.load(sys.stdin)
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # output of the runtime must not mix with the answer
    try:
        answer = _answer(question)
    except (RuntimeError, ValueError) as error:
        answer = {"error": " ".join(str(error).split())}
    with os.fdopen(answer_fd, "w") as file:
        json.dump(answer, file)


def _answer(question: Any) -> dict[str, Any]:
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    interpreter = Interpreter(
        question["path"],
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,
    )
    details = interpreter.get_input_details()
    for number, shape in question["shapes"].items():
        interpreter.resize_tensor_input(details[int(number)]["index"], shape)
    interpreter.allocate_tensors()
    for number, detail in enumerate(details):
        shape = interpreter.get_tensor(detail["index"]).shape  # after the resizing
        value = np.zeros(shape, detail["dtype"])
        if question["inputs"] is not None:
            value = np.frombuffer(bytes.fromhex(question["inputs"][number]), detail["dtype"]).reshape(shape)
        interpreter.set_tensor(detail["index"], value)
    # Shapes that depend on other tensors' values are known only after a run.
    interpreter.invoke()
    shapes = {int(d["index"]): [int(size) for size in d["shape"]] for d in interpreter.get_tensor_details()}
    values = {t: interpreter.get_tensor(t).tobytes().hex() for t in question["values"]}
    ranged = {t: interpreter.get_tensor(t) for t in question.get("ranges", ())}
    ranges = {t: (float(array.min()), float(array.max())) for t, array in ranged.items()}
    return {"shapes": [shapes.get(t) for t in range(question["tensors"])], "values": values, "ranges": ranges}


if __name__ == "__main__":
    main()
