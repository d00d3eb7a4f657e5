"""What ``optimize rewrite`` prints for a person."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from optimizer.inspect_text import human_count, printable
from optimizer.rewrite_tucker import Rewritten
from search_spaces.rewrites.tucker import Layer
from search_spaces.rewrites.tucker_ranks import Choice
from search_spaces.wording import human_bytes, percent


def render(found: Rewritten) -> Group:
    """Return layers with their ranks, then work, outputs, times and the file."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("op", justify="right")
    table.add_column("layer", no_wrap=True)
    for name in ("filter", "ranks", "MACs", "fewer", "filter error"):
        table.add_column(name, justify="right", no_wrap=True)
    if found.prices is not None:
        table.add_column("predicted", justify="right", no_wrap=True)
    for choice in found.choices:
        table.add_row(*_row(found, choice))
    kept = [c for c in found.choices if c.ranks is None]
    return Group(table, Text(), *(Text(line) for line in [*_kept(kept), *_sums(found)]))


def _row(found: Rewritten, choice: Choice) -> list[str]:
    layer, ranks = choice.layer, choice.ranks
    before, after = layer.macs(), layer.macs(ranks)
    error = found.errors.get(layer.operator)
    row = [
        str(layer.operator),
        printable(layer.name, 40),
        _filter(layer),
        "as it was" if ranks is None else f"{ranks.inputs}×{ranks.outputs}",
        human_count(before) if ranks is None else f"{human_count(before)} → {human_count(after)}",
        "" if ranks is None else percent(1 - after / before),
        "" if error is None else f"{error:.2g}",
    ]
    if found.prices is not None:
        triple_s = found.prices.triple_s.get(layer.operator)
        layer_ms = f"{found.prices.layer_s[layer.operator] * 1e3:.3f}"
        row.append(f"{layer_ms} ms" if triple_s is None else f"{layer_ms} → {triple_s * 1e3:.3f} ms")
    return row


def _filter(layer: Layer) -> str:
    groups = f"{layer.groups} groups of " if layer.groups > 1 else ""
    return f"{groups}{layer.kernel[0]}×{layer.kernel[1]}, {layer.inputs}→{layer.outputs}"


def _kept(kept: list[Choice]) -> list[str]:
    lines = [f"as it was: {printable(c.layer.name, 40)}: {c.why}" for c in kept[:8]]
    return [*lines, f"… and {len(kept) - 8} more"] if len(kept) > 8 else lines


def _sums(found: Rewritten) -> list[str]:
    before, after = found.macs
    lines = [
        f"MACs {human_count(before)} → {human_count(after)}, {percent(1 - after / before, 1)} fewer",
        f"outputs differ by {found.output_error:.2g} of their norm on inputs of seed {found.request.seed}"
        + (", before quantisation" if found.int8 else ""),
    ]
    if found.prices is not None and found.model_s is not None:
        first, second = found.model_s
        lines.append(f"predicted for {found.prices.lane}: {first * 1e3:.2f} → {second * 1e3:.2f} ms")
    return [*lines, f"{found.request.out}: {human_bytes(found.nbytes)}"]
