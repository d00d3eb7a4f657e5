"""The reference of campaign files as Markdown, made from their JSON Schema; ``experiments/README.md`` holds it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from optimizer.campaign_file import json_schema

_PARTS = {"Matrix": "matrix", "Cell": "include, exclude, where", "Settings": "settings", "Expectation": "expect"}
_NAMES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}


def reference() -> str:
    """Return a table of keys for the file and for each part of it."""
    schema = json_schema()
    parts = ["### The file", "", *_table(schema)]
    for name, key in _PARTS.items():
        part = schema["$defs"][name]
        about = " ".join(part["description"].split()).replace(":class:`Matrix`", "`matrix`")
        parts += ["", f"### `{key}`", "", about, "", *_table(part, is_filter=name == "Cell")]
    return "\n".join(parts) + "\n"


def _table(part: Mapping[str, Any], *, is_filter: bool = False) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    required = part.get("required", ())
    for name, value in part["properties"].items():
        left_out = "required" if name in required else "any" if is_filter else _default(value)
        yield f"| `{name}` | {_kind(value)} | {left_out} | {value['description'].replace('|', chr(92) + '|')} |"


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if default == [] or isinstance(default, dict) or "default" not in value:
        return "none"
    if isinstance(default, list) and len(default) == 1:  # of an axis
        default = default[0]
    return f"`{json.dumps(default)}`"


def _kind(value: Mapping[str, Any]) -> str:
    """Return the values that a key may have, in words."""
    if "$ref" in value:
        return f"a mapping, see `{_PARTS[value['$ref'].rpartition('/')[2]].rpartition(' ')[2]}`"
    if "enum" in value:
        return " or ".join(f"`{v}`" for v in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "anyOf" in value:
        kinds = [_kind(each) for each in value["anyOf"]]
        many = [k for k in kinds if k.startswith("a list of ")]
        return f"{kinds[-1]}, or a list" if many else " or ".join(kinds)
    if value["type"] == "array":
        return f"a list of {_kind(value['items']).replace('a mapping', 'mappings')}"
    bounds = [f"{word} {value[key]:g}" for key, word in _BOUNDS.items() if key in value]
    return f"{_NAMES[value['type']]}{', ' if bounds else ''}{', '.join(bounds)}"


_BOUNDS = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
