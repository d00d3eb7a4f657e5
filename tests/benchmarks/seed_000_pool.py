"""Seed 000's reading of its result, tried on a GPU: VGG16 where the GPU's memory holds only a part of the weights.

``python -m tests.benchmarks.seed_000_pool OUT.json`` (needs torch and an NVIDIA GPU)

A pool of the GPU's memory holds a share of the weights; the rest lies in pinned memory of the host, and is copied when
an operator needs it. Weights above 32 MiB are tiled by outputs, since one layer has 78 % of all. Ways to run:

``paged``    whole; what is missing is copied when it is needed, in place of what was used longest ago, as a pager does
``ahead``    whole; the next operator's weights are copied while an operator runs
``parts``    in parts: a part's weights are copied before it runs, and those of other parts go; parts that do not fit
             into the pool are named as such

Layers are counted as 16, those with weights, and as 22, all operators.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.samples import Samples
from optimizer.provenance import provenance
from search_spaces.core.graph import Graph
from search_spaces.models import load
from search_spaces.spaces.cuts import every_layer, layer_length, layer_type, parameter_count

MODEL = "vgg16"
SHARES = (None, 1.5, 1.0, 0.7, 0.4)
"""Of the weights; None: all stay on the GPU."""
TILE_NBYTES = 32 << 20
WARM, RUNS, REPETITIONS = 3, 20, 3
_ALIGN = 512


@dataclass(eq=False)
class Piece:
    """The weights of an operator, or a tile of them, and where they lie in the pool."""

    operator: int
    host: Any
    run: Callable[[Any, Any], Any]
    offset: int = -1
    used: int = -1
    free: Any = None
    there: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes in the pool."""
        return -(-int(self.host.numel()) * 4 // _ALIGN) * _ALIGN


@dataclass(eq=False)
class Network:
    """The operators of a model as functions of an activation and of weights in the pool."""

    graph: Graph
    pieces: list[Piece] = field(default_factory=list)
    plain: dict[int, Callable[[Any], Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(piece.nbytes for piece in self.pieces)


def built(graph: Graph, torch: Any) -> Network:
    """Return a chain of convolutions, pools and fully connected layers with random weights of the model's shapes."""
    found, functional = Network(graph), torch.nn.functional
    generator = torch.Generator().manual_seed(0)
    for index, operator in enumerate(graph.operators):
        shapes = [graph.tensors[t].shape for t in operator.inputs if graph.tensors[t].constant]
        if operator.kind == "CONV_2D":
            out, height, width, of = shapes[0]
            host = torch.randn((out, of, height, width), generator=generator) / (of * height * width) ** 0.5

            def convolve(x: Any, w: Any) -> Any:
                return functional.relu(functional.conv2d(x, w, padding=w.shape[-1] // 2))

            found.pieces.append(Piece(index, host.pin_memory(), convolve))
        elif operator.kind == "FULLY_CONNECTED":
            out, of = shapes[0]
            count = -(-out * of * 4 // TILE_NBYTES)
            for part in np.array_split(np.arange(out), count):
                host = torch.randn((len(part), of), generator=generator) / of**0.5

                def connect(x: Any, w: Any) -> Any:
                    return functional.linear(x.flatten(1), w)

                found.pieces.append(Piece(index, host.pin_memory(), connect))
        elif operator.kind == "MAX_POOL_2D":
            found.plain[index] = lambda x: functional.max_pool2d(x, 2)
        elif operator.kind == "SOFTMAX":
            found.plain[index] = lambda x: functional.softmax(x, 1)
        else:
            raise ValueError(operator.kind)
    return found


class Pool:
    """Memory of the GPU that holds pieces; the one used longest ago makes room."""

    def __init__(self, network: Network, nbytes: int, torch: Any) -> None:
        self.torch, self.network, self.nbytes = torch, network, nbytes
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self.copies, self.clock, self.copied_nbytes = torch.cuda.Stream(), 0, 0
        for piece in network.pieces:
            piece.offset, piece.used, piece.free = -1, -1, None

    def evict(self, pieces: Sequence[Piece]) -> None:
        """Give up the room of pieces."""
        for piece in pieces:
            piece.offset = -1

    def bring(self, piece: Piece, kept: Sequence[Piece] = ()) -> None:
        """Copy a piece into the pool, unless it is there; pieces that are kept stay."""
        self.clock += 1
        piece.used = self.clock
        if piece.offset >= 0:
            return
        while (offset := self._hole(piece.nbytes)) is None:
            others = [p for p in self.network.pieces if p.offset >= 0 and p is not piece and p not in kept]
            if not others:
                raise MemoryError
            self.evict([min(others, key=lambda p: p.used)])
        piece.offset = offset
        for other in self.network.pieces:  # whoever may still read what is overwritten
            if other.free is not None:
                self.copies.wait_event(other.free)
        with self.torch.cuda.stream(self.copies):
            piece.there = self._view(piece)
            piece.there.copy_(piece.host, non_blocking=True)
            ready = self.copies.record_event()
        self.torch.cuda.current_stream().wait_event(ready)
        self.copied_nbytes += piece.nbytes

    def _view(self, piece: Piece) -> Any:
        flat = self.memory[piece.offset : piece.offset + piece.host.numel() * 4].view(self.torch.float32)
        return flat.view(piece.host.shape)

    def _hole(self, nbytes: int) -> int | None:
        at = 0
        for piece in sorted((p for p in self.network.pieces if p.offset >= 0), key=lambda p: p.offset):
            if piece.offset - at >= nbytes:
                return at
            at = piece.offset + piece.nbytes
        return at if self.nbytes - at >= nbytes else None


def inference(pool: Pool, x: Any, cuts: Sequence[int] | None, *, ahead: bool) -> Any:
    """Run the network once and return its output.

    Args:
        cuts: where parts begin; None to copy what is needed when it is needed.
        ahead: copy the next piece while one runs.
    """
    torch, pieces = pool.torch, pool.network.pieces
    done: list[Any] = []
    for index in range(len(pool.network.graph.operators)):
        if cuts is not None and (index == 0 or index in cuts):
            end = next((c for c in cuts if c > index), len(pool.network.graph.operators))
            own = [p for p in pieces if index <= p.operator < end]
            pool.evict([p for p in pieces if p not in own])
            for piece in own:
                pool.bring(piece, own)
        if index in pool.network.plain:
            x = pool.network.plain[index](x)
            continue
        done = []
        for piece in (p for p in pieces if p.operator == index):
            pool.bring(piece)
            follows = pieces[(pieces.index(piece) + 1) % len(pieces)]
            event = None
            if ahead and follows.offset < 0:
                event = follows
            done.append(piece.run(x, piece.there))
            piece.free = torch.cuda.current_stream().record_event()
            if event is not None:
                _bring_ahead(pool, follows, piece)
        x = done[0] if len(done) == 1 else torch.cat(done, 1)
    return x


def _bring_ahead(pool: Pool, piece: Piece, running: Piece) -> None:
    """Copy the next piece beside the running one, which the copy does not wait for."""
    free, running.free = running.free, None
    try:
        pool.bring(piece, [running])
    except MemoryError:
        pass  # the two do not fit together
    finally:
        running.free = free


def plans_of(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Return where parts begin, by the criteria of the seed; layers are counted in two ways."""
    weighted = [i for i, o in enumerate(graph.operators) if any(graph.tensors[t].constant for t in o.inputs[1:2])]
    weighted = [i for i in weighted if graph.operators[i].kind in {"CONV_2D", "FULLY_CONNECTED"}]
    found = {"layer type K=2": layer_type(graph), "every layer": every_layer(graph)}
    for k in (2, 3, 4):
        found[f"{len(graph.operators)} layers in {k}"] = layer_length(graph, k)
        found[f"{len(weighted)} layers in {k}"] = tuple(weighted[len(weighted) * i // k] for i in range(1, k))
        found[f"parameter count K={k}"] = parameter_count(graph, k)
    return found


def timed(network: Network, x: Any, nbytes: int, cuts: Sequence[int] | None, torch: Any, *, ahead: bool) -> Any:
    """Return the milliseconds of runs, the bytes copied in one, and the output; None where a part does not fit."""
    pool = Pool(network, nbytes, torch)
    took_ms, before = [], 0
    try:
        for run in range(WARM + RUNS):
            before = pool.copied_nbytes
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            found = inference(pool, x, cuts, ahead=ahead)
            torch.cuda.synchronize()
            if run >= WARM:
                took_ms.append((time.perf_counter() - begin_s) * 1e3)
    except MemoryError:
        return None
    return took_ms, pool.copied_nbytes - before, found.cpu()


def main() -> None:
    """Time each way under each limit, in random order, several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    import torch

    torch.backends.cudnn.allow_tf32 = False
    graph = load(MODEL)
    network = built(graph, torch)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((1, 3, 224, 224), generator=generator).cuda()
    ways: dict[str, tuple[Sequence[int] | None, bool]] = {"whole, paged": (None, False), "whole, ahead": (None, True)}
    ways |= {f"in parts: {name}": (cuts, False) for name, cuts in plans_of(graph).items()}
    rows: dict[tuple[float | None, str], list[float]] = {}
    copied: dict[tuple[float | None, str], int] = {}
    expected, differs, rng = None, 0.0, np.random.default_rng(0)
    with torch.inference_mode():
        for _ in range(REPETITIONS):
            pairs = [(share, name) for share in SHARES for name in ways]
            for which in rng.permutation(len(pairs)):
                share, name = pairs[which]
                if share is None and name.startswith("in parts"):
                    continue  # everything stays: the same as whole
                nbytes = int(network.nbytes * (1.0 if share is None else share)) + _ALIGN
                made = timed(network, x, nbytes, ways[name][0], torch, ahead=ways[name][1])
                if made is None:
                    continue
                took_ms, nbytes_copied, output = made
                expected = output if expected is None else expected
                differs = max(differs, float((output - expected).abs().max() / expected.abs().max()))
                rows.setdefault((share, name), []).extend(took_ms)
                copied[share, name] = nbytes_copied
    limits: dict[str, Any] = {}
    for share in SHARES:
        found = limits.setdefault("none" if share is None else f"{share:g} of the weights", {})
        for name in ways:
            if (share, name) in rows:
                every = Samples(tuple(rows[share, name]))
                figures = {"median_ms": round(every.median, 3), "ci95_ms": [round(v, 3) for v in every.ci95]}
                found[name] = figures | {"copied_mib": round(copied[share, name] / 2**20, 1)}
            elif share is not None:
                found[name] = {"failed": "a part does not fit into the pool"}
    document = {
        "schema_version": 1,
        "made_by": "python -m tests.benchmarks.seed_000_pool OUT.json",
        **provenance(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "weights_mib": round(network.nbytes / 2**20, 1),
        "largest_difference_of_outputs": differs,
        "limits": limits,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    for share, found in limits.items():
        print(share, {name: row.get("median_ms") for name, row in found.items()}, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
