"""Folders of libraries that a lane's process may load: the user names them, on the command line or in a file of theirs.

``libraries.yaml`` in the user's configuration folder binds names, by which platform files and campaigns refer to them::

    libraries:
      my_npu: /opt/vendor/dispatch   # then the lane is npu:my_npu; paths are relative to this file

``PARTITION_OPTIMIZER_LIBRARIES`` names another file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from evaluators.litert.processor_names import parse_lane
from search_spaces.allowed_code import is_allowed
from search_spaces.errors import UsageError, shown
from search_spaces.yaml_file import parsed

ENVIRONMENT = "PARTITION_OPTIMIZER_LIBRARIES"


def libraries_file() -> Path:
    """Return the file that binds names to folders, which need not exist."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    from platformdirs import user_config_path

    return user_config_path("partition-optimizer") / "libraries.yaml"


def bound_folders() -> Mapping[str, Path]:
    """Return the folders that the user has bound, by name.

    Raises:
        UsageError: the file is wrong; the text begins with ``file:line``.
    """
    path = libraries_file()
    if not path.exists():
        return {}
    fields = parsed(path, "libraries").fields("a file of libraries", ("libraries",))
    if "libraries" not in fields:
        return {}
    entries = fields["libraries"].items("libraries")
    return {k.text("a name"): path.parent / Path(v.text("a folder")).expanduser() for k, v in entries}


def library_folder(word: str, text: str = "") -> Path:
    """Return the folder that a name, or a path, stands for.

    Args:
        word: what a lane's name or its options say.
        text: the whole name of the lane, which counts if the user typed it.

    Raises:
        UsageError: the user has named neither.
    """
    bound = bound_folders()
    if word in bound:
        return bound[word]
    if Path(word) in bound.values() or is_allowed(word) or (text and is_allowed(text)):
        return Path(word)
    raise UsageError(
        f"processor {shown(text or word)}: a library is code, and no user of this machine has named {shown(word)}",
        f"bind it to a name in {libraries_file()}, or give --processors npu:FOLDER",
    )


def check_libraries(lane: str) -> None:
    """Check that the user has named the library that a lane's name asks for, if it asks for one.

    Raises:
        UsageError: they have not.
    """
    if lane.startswith("npu:") and (folder := parse_lane(lane).folder):
        library_folder(folder, lane)
