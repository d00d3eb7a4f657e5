"""A custom operator ``Twice`` that doubles each number, and a library with its kernel for the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIBRARY = r"""
#include <stddef.h>
#include <stdint.h>
struct Layout { uint32_t bits; int32_t dimensions[8]; uint32_t strides[8]; };
int LiteRtLockTensorBuffer(void*, void**, int);
int LiteRtUnlockTensorBuffer(void*);
int LiteRtGetTensorBufferSize(void*, size_t*);
static int init(void* data, const void* options, size_t n) { return 0; }
static int layouts(void* data, size_t n, const struct Layout* in, size_t m, struct Layout* out) {
  for (size_t i = 0; i < m; ++i) out[i] = in[0];
  return 0;
}
static int run(void* data, size_t n, void* const* in, size_t m, void** out) {
  size_t nbytes;
  void *from, *to;
  if (LiteRtGetTensorBufferSize(out[0], &nbytes)) return 1;
  if (LiteRtLockTensorBuffer(in[0], &from, 0) || LiteRtLockTensorBuffer(out[0], &to, 1)) return 1;
  for (size_t i = 0; i < nbytes / sizeof(float); ++i) ((float*)to)[i] = 2 * ((float*)from)[i];
  return LiteRtUnlockTensorBuffer(in[0]) || LiteRtUnlockTensorBuffer(out[0]);
}
static int destroy(void* data) { return 0; }
struct { void *init, *layouts, *run, *destroy; } litert_custom_op_Twice = {init, layouts, run, destroy};
"""


def kernels(folder: Path, code: str = LIBRARY) -> Path:
    """Compile the library, and return its path; its source ``ops.c`` lies beside it."""
    source, library = folder / "ops.c", folder / "libops.so"
    source.write_text(code)
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    return library
