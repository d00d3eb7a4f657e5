"""What a processor's options mean to the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_spaces.platform import Processor


def compile_settings(processor: Processor, packed: Path | None) -> dict[str, Any]:
    """Return LiteRT's CPU options for a lane; packed weights are XNNPACK's, other kernels do not know them."""
    settings: dict[str, Any] = {"num_threads": processor.options["threads"]}
    if "kernel_mode" in processor.options:
        settings["kernel_mode"] = processor.options["kernel_mode"]
    elif packed is not None:
        settings["weight_cache_file_path"] = str(packed)
    return settings
