"""What LiteRT alone makes of a dense layer over four dimensions: ``python -m tests.benchmarks.dense [--f32]``.

Its own Python interface compiles (1, 7, 7, 64) → 100, with and without the RESHAPE spelled out, for the GPU and for the
CPU, and prints the greatest difference as a share of the greatest value. ``VK_DRIVER_FILES`` chooses the adapter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from search_spaces.models.zoo.builder import Builder

SHAPE, UNITS = (1, 7, 7, 64), 100


def model(path: Path, *, reshape: bool) -> None:
    """Write the layer, alone or behind a RESHAPE."""
    net = Builder("dense")
    x = net.input(SHAPE)
    if reshape:
        x = net.reshape(x, (1, int(np.prod(SHAPE))), "row")
    net.finish(net.fully_connected(x, UNITS, "dense")).write(path)


def outputs(path: Path, image: Any, options: Any) -> Any:
    """Return what LiteRT's compiled model computes."""
    from ai_edge_litert.compiled_model import CompiledModel

    compiled = CompiledModel.from_file(str(path), options=options)
    read, written = compiled.create_input_buffers(0), compiled.create_output_buffers(0)
    read[0].write(image)
    compiled.run_by_index(0, read, written)
    return written[0].read(UNITS, np.float32)


def main() -> None:
    """Print a line for each of both models."""
    from ai_edge_litert.gpu_options import GpuOptions
    from ai_edge_litert.hardware_accelerator import HardwareAccelerator
    from ai_edge_litert.options import Options

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--f32", action="store_true")
    gpu = Options(HardwareAccelerator.GPU, gpu_options=GpuOptions(enforce_f32=parser.parse_args().f32))
    image = np.random.default_rng(0).uniform(-1, 1, SHAPE).astype(np.float32)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "dense.tflite"
        for reshape in (False, True):
            model(path, reshape=reshape)
            wanted = outputs(path, image, Options(HardwareAccelerator.CPU))
            error = np.abs(outputs(path, image, gpu) - wanted).max() / np.abs(wanted).max()
            sys.stdout.write(f"{'with' if reshape else 'without'} RESHAPE: {error:.1e}\n")


if __name__ == "__main__":
    main()
