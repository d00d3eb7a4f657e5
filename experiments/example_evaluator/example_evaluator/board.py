"""The program on the board: ``python board.py FOLDER``. It needs numpy and ai-edge-litert, and nothing else of ours.

Its ``cpu`` is one thread with XNNPACK, its ``dsp`` one with plain kernels, several times slower.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

KERNELS = {"cpu": OpResolverType.AUTO, "dsp": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES}

folder = Path(sys.argv[1])
plan = json.loads((folder / "plan.json").read_text())
stages = []
for file, stage in zip(plan["files"], plan["stages"], strict=True):
    resolver = KERNELS[stage["processor"]]
    loaded = Interpreter(str(folder / file["file"]), num_threads=1, experimental_op_resolver_type=resolver)
    loaded.allocate_tensors()
    reads = list(zip((d["index"] for d in loaded.get_input_details()), file["inputs"], strict=True))
    writes = list(zip((d["index"] for d in loaded.get_output_details()), file["outputs"], strict=True))
    stages.append((loaded, reads, writes))
rng = np.random.default_rng(0)
values = {i: rng.standard_normal(plan["tensors"][i]["shape"], dtype="f4") for i in plan["inputs"]}
for line in sys.stdin:
    if line.strip() == "outputs":
        print(json.dumps({"outputs": [values[i].tolist() for i in plan["outputs"]]}), flush=True)
        continue
    runs, limit_s = int(line.split()[0]), float(line.split()[1])
    times = []
    while len(times) < runs and not (times and sum(times[-1]) > limit_s):
        marks = [time.perf_counter()]
        for loaded, reads, writes in stages:
            for index, tensor in reads:
                loaded.set_tensor(index, values[tensor])
            loaded.invoke()
            values |= {tensor: loaded.get_tensor(index) for index, tensor in writes}
            marks.append(time.perf_counter())
        times.append(np.diff(marks).tolist())
    print(json.dumps({"latency_s": [sum(stage_s) for stage_s in times], "stage_s": times}), flush=True)
