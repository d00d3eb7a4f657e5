"""Messages between an agent and its clients: JSON of bounded size, and files in pieces. Never code.

The transport is gRPC, which brings TLS on both sides, deadlines, size limits and pings to clients that vanished. Dask
distributed was tried first and rejected: its scheduler and workers unpickle messages before other code can check them
(dask/distributed#9283), so anyone who may measure there could run any code there.

A call is one message each way; ``Store`` takes a stream of pieces and ``Fetch`` returns one. Every reader here treats
its input as damaged until it has been checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from evaluators.base import Agreement, Batch, Capabilities
from search_spaces.core.bounded import built, parsed_json, plain
from search_spaces.core.errors import OptimizeError, UnavailableError, UsageError, damage, shown
from search_spaces.core.plan import LayerRanks
from search_spaces.core.platform import Platform, Processor

SERVICE = "partition_optimizer.Agent"
VERSION = 4
DEFAULT_PORT = 7450
MESSAGE_NBYTES = 8 << 20
PIECE_NBYTES = 1 << 20
MAX_RUNS = 100_000
DIGEST = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"plan\.json|stage_[0-9]{1,6}\.(?:tflite|part)")
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_NBYTES),
    ("grpc.max_send_message_length", MESSAGE_NBYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:=+@() -]{0,99}")
_MAX_PROCESSORS = 1024
# Not available from afar: counters are read twice on one device, and tables of costs do not fit into a message.
_FAR = dict.fromkeys(("counters", "placements", "costs", "states", "decompose", "figures", "traffic"), False)


class WireError(UnavailableError):
    """A message does not follow the protocol."""


def packed(data: Mapping[str, Any]) -> bytes:
    """Return a message's bytes.

    Raises:
        WireError: it holds a value that JSON cannot represent, or is too large.
    """
    try:
        content = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a message cannot be sent: {error}") from error
    if len(content) > MESSAGE_NBYTES - 1024:
        raise WireError(f"a message of {len(content)} bytes cannot be sent: at most {MESSAGE_NBYTES - 1024}")
    return content


def unpacked(content: bytes) -> dict[str, Any]:
    """Return a message's content.

    Raises:
        WireError: the message is not a JSON object.
    """
    try:
        data = parsed_json(content)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise WireError(f"a message must be a JSON object, not {shown(data)}")
    return data


def text(data: Mapping[str, Any], key: str, pattern: re.Pattern[str] = _NAME) -> str:
    """Return a field that must be text of a certain form: by default a plain name.

    Raises:
        WireError: the field is missing or has another form.
    """
    found = data.get(key)
    if not isinstance(found, str) or not pattern.fullmatch(found):
        raise WireError(f"{key} is {shown(found)}, which is not accepted")
    return found


def whole(data: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """Return a field that must be a whole number from ``least`` to ``most``.

    Raises:
        WireError: the field is missing or out of range.
    """
    found = data.get(key)
    if type(found) is not int or not least <= found <= most:
        raise WireError(f"{key} is {shown(found)}, not a whole number from {least} to {most}")
    return found


def seconds(data: Mapping[str, Any], key: str) -> float:
    """Return a field of seconds; infinity where it is None, which means no limit.

    Raises:
        WireError: the field is neither None nor a number of seconds.
    """
    found = data.get(key)
    if found is None:
        return math.inf
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0.0 <= found < math.inf:
        raise WireError(f"{key} is {shown(found)}, not seconds")
    return float(found)


def finite(limit_s: float) -> float | None:
    """Return seconds as a message holds them: None for infinity."""
    return limit_s if math.isfinite(limit_s) else None


def batch_to_json(batch: Batch) -> dict[str, Any]:
    """Return a batch as plain values."""
    found: dict[str, Any] = plain(Batch, batch)
    if batch.outcome is not None:
        del found["outcome"]["timeline"]  # that of the batch
    return {name: value for name, value in found.items() if value is not None or name not in {"outcome", "run_s"}}


def batch_from_json(data: Any) -> Batch:
    """Build a batch from what :func:`batch_to_json` returned; the caller checks its numbers.

    Raises:
        WireError: a field is missing or has the wrong type.
    """
    if isinstance(data, dict) and isinstance(data.get("outcome"), dict):
        data = {**data, "outcome": {**data["outcome"], "timeline": data.get("timeline")}}
    return built(Batch, data, "an answer is", WireError)


def ranks_from_json(data: Any) -> tuple[LayerRanks, ...]:
    """Build ranks of convolutions from plain values.

    Raises:
        WireError: the values are not ranks.
    """
    try:
        return tuple(LayerRanks(*map(int, each)) for each in data)
    except (TypeError, ValueError) as error:
        raise WireError(f"ranks are damaged: {damage(error)}") from error


def capabilities_from_json(data: Any) -> Capabilities:
    """Return those capabilities of a session on a device that can be used from here.

    Raises:
        WireError: the data is not a JSON object.
    """
    if not isinstance(data, dict):
        raise WireError(f"capabilities must be a JSON object, not {shown(data)}")
    return replace(Capabilities(**{f.name: data.get(f.name) is True for f in fields(Capabilities)}), **_FAR)


def agreement_from_json(data: Any) -> Agreement | None:
    """Build an agreement from its fields as plain values.

    Raises:
        WireError: a field is missing or has the wrong type.
    """
    return None if data is None else built(Agreement, data, "an answer is", WireError)


def agreement_to_json(agreement: Agreement | None) -> dict[str, Any] | None:
    """Return an agreement as plain values; an error that is not a number becomes None."""
    return None if agreement is None else agreement.to_json()


def platform_to_json(platform: Platform) -> dict[str, Any]:
    """Return a platform, its limits included, as plain values."""
    return {**platform.to_json(), "limits": asdict(platform.limits)}


def platform_from_json(data: Any, known: Sequence[Processor] | None = None) -> Platform:
    """Build a platform from what :func:`platform_to_json` returned.

    Args:
        known: processors that this device has. Each of the platform's must have kind and options of one of them, since
            options reach the runtime: numbers of cores and threads, adapters, libraries. None accepts any.

    Raises:
        WireError: a field is missing or has the wrong type, or a processor is unknown.
    """
    entries = data.get("processors") if isinstance(data, dict) else None
    if isinstance(entries, list):  # before anything compares all of their names
        if len(entries) > _MAX_PROCESSORS:
            raise WireError(f"a platform of {len(entries)} processors is not accepted")
        for entry in entries:
            text(entry if isinstance(entry, dict) else {}, "name")
    found = built(Platform, data, "a platform is", WireError)
    for limit_s in (found.limits.load_s, found.limits.run_s):
        if not 0.01 <= limit_s <= 86_400.0:
            raise WireError(f"a limit of {limit_s} s is not accepted")
    text({"name": found.name}, "name")
    return replace(found, processors=tuple(_accepted(processor, known) for processor in found.processors))


def _accepted(given: Processor, known: Sequence[Processor] | None) -> Processor:
    name, options = given.name, dict(given.options)
    if not all(0.0 < share <= 1.0 for share in given.resources.values()):
        raise WireError(f"processor {name!r} has shares that are not valid: {shown(given.resources)}")
    if known is None:
        options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    else:
        same = json.dumps(options, sort_keys=True)
        found = [p for p in known if p.kind == given.kind and json.dumps(dict(p.options), sort_keys=True) == same]
        if not found:
            raise WireError(f"this device has no processor {name!r}", "name one that it has")
        options = dict(found[0].options)
    whole({"slots": given.slots}, "slots", 1, 1024)
    return replace(given, like=given.like[:200], options=options)


def error_to_json(error: OptimizeError) -> dict[str, Any]:
    """Return an error of this product as plain values."""
    return {"error": {"what": error.what, "hint": error.hint, "usage": isinstance(error, UsageError)}}


def raise_reported(data: Mapping[str, Any], device: str) -> None:
    """Raise the error in an answer, if any.

    Raises:
        UsageError, UnavailableError: the error on the device.
    """
    error = data.get("error")
    if isinstance(error, Mapping):
        kind = UsageError if error.get("usage") is True else UnavailableError
        raise kind(f"{device}: {str(error.get('what'))[:2000]}", str(error.get("hint", ""))[:500])


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yield a file in pieces that fit into a message."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_NBYTES):
            yield piece
