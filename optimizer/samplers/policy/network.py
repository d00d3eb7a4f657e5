"""A policy over cuts and placements, and its gradient; numpy only.

A plan is a sequence of decisions, one before each operator (:mod:`~optimizer.samplers.policy.features`). A network of
one hidden layer gives each action a score; the softmax over the actions that are possible is the policy. Its weights
are shared by all operators, processors and models. Before anything is learned, cuts are as likely as in a plan whose
number of parts is uniform, and lanes are uniform.
"""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimizer.samplers.policy.features import DYNAMIC, NAMES, Features
from search_spaces.core.bounded import read_bounded
from search_spaces.core.errors import UsageError

SCHEMA_VERSION = 1
HIDDEN = 32
_MAKE_ONE = "optimize pretrain makes one"
_Array = NDArray[np.float64]
_Ints = NDArray[np.int64]
_MOST_NBYTES = 4 << 20  # of unpacked weights
_DAMAGED = (
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Of the network: ``score = out · tanh(inner · x + bias)``.

    Attributes:
        inner: shape ``(F, H)``.
        bias, out: shape ``(H,)``.
    """

    inner: _Array
    bias: _Array
    out: _Array

    @classmethod
    def new(cls, seed: int) -> Weights:
        """Return weights of a policy that has learned nothing: all scores are 0."""
        rng = np.random.default_rng([seed, 77])
        return cls(rng.standard_normal((len(NAMES), HIDDEN)) / np.sqrt(len(NAMES)), np.zeros(HIDDEN), np.zeros(HIDDEN))

    def arrays(self) -> tuple[_Array, _Array, _Array]:
        """Return the three arrays."""
        return self.inner, self.bias, self.out

    def softened(self, certainty: float) -> Weights:
        """Return the weights of a policy whose scores are that share of these; 0 has learned nothing."""
        return self if certainty == 1.0 else Weights(self.inner, self.bias, self.out * certainty)

    def save(self, path: Path) -> None:
        """Write the weights as ``.npz``, with the names of the features that they are for.

        Raises:
            OSError: the file cannot be written.
        """
        with path.open("wb") as file:
            np.savez(
                file, inner=self.inner, bias=self.bias, out=self.out, schema_version=SCHEMA_VERSION, features=NAMES
            )

    @classmethod
    def load(cls, path: Path) -> Weights:
        """Read weights that :meth:`save` wrote.

        Raises:
            UsageError: the file cannot be read, is no policy, or is for other features than this version has.
        """
        try:
            # Read whole first: numpy leaves a file open that is no archive.
            packed = io.BytesIO(read_bounded(path))
            with zipfile.ZipFile(packed) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > _MOST_NBYTES:
                    raise ValueError("too large")
            with np.load(packed, allow_pickle=False) as content:
                version, names = int(content["schema_version"]), tuple(str(n) for n in content["features"])
                found = cls(*(np.asarray(content[name], dtype=np.float64) for name in ("inner", "bias", "out")))
        except OSError as error:
            raise UsageError(f"{path}: not a policy: {(error.strerror or str(error)).lower()}", _MAKE_ONE) from error
        except _DAMAGED as error:
            raise UsageError(f"{path}: not a policy, or a damaged one", _MAKE_ONE) from error
        if version != SCHEMA_VERSION or names != NAMES:
            raise UsageError(f"{path}: a policy for other features than this version has", "train it again")
        shapes = [a.shape for a in found.arrays()]
        if shapes != [(len(NAMES), HIDDEN), (HIDDEN,), (HIDDEN,)] or not all(
            np.isfinite(a).all() for a in found.arrays()
        ):
            raise UsageError(f"{path}: a damaged policy: its weights have the shapes {shapes}", "train it again")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Plans that a policy drew together, and what their gradient needs.

    Attributes:
        actions: shape ``(B, n)``: 0 to stay, ``1 + p`` to begin a part on lane ``p``.
        inputs: shape ``(B, n, A, F)``.
        probabilities: shape ``(B, n, A)``.
    """

    actions: _Ints
    inputs: _Array
    probabilities: _Array

    def chains(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the cuts and the lanes of each plan."""
        found = []
        for row in self.actions:
            cuts = np.flatnonzero(row)
            found.append((tuple(cuts[1:].tolist()), tuple((row[cuts] - 1).tolist())))
        return found


def roll_out(weights: Weights, seen: Features, count: int, rng: np.random.Generator) -> Rollout:
    """Draw ``count`` plans."""
    return _walk(weights, seen, None, count, rng)


def retrace(weights: Weights, seen: Features, chains: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rollout:
    """Return the decisions that lead to given plans, as the policy sees them."""
    actions = np.zeros((len(chains), len(seen.table)), dtype=np.int64)
    for row, (cuts, lanes) in enumerate(chains):
        actions[row, [0, *cuts]] = np.array(lanes) + 1
    return _walk(weights, seen, actions, len(chains), np.random.default_rng(0))


def _walk(weights: Weights, seen: Features, given: _Ints | None, batch: int, rng: np.random.Generator) -> Rollout:
    """Take one decision before each operator, for all plans of a batch side by side."""
    count, _, choices, fixed = seen.table.shape
    lane, parts, began = np.zeros(batch, dtype=np.int64), np.zeros(batch), np.zeros(batch)
    actions = np.zeros((batch, count), dtype=np.int64)
    inputs = np.zeros((batch, count, choices, fixed + DYNAMIC))
    probabilities = np.zeros((batch, count, choices))
    uniform = rng.random((batch, count))
    for operator in range(count):
        x = inputs[:, operator]
        x[:, :, :fixed] = seen.table[operator, lane]
        x[:, 1:, fixed] = (1.0 - parts / seen.max_stages)[:, None]
        x[:, 1:, fixed + 1] = ((operator - began) / count)[:, None]
        score = np.tanh(x @ weights.inner + weights.bias) @ weights.out
        left = np.maximum(seen.max_stages - parts, 0.0)
        rate = np.clip(seen.cut_rate[operator, parts.astype(int)], 1e-6, 1.0 - 1e-6)
        score[:, 1:] += (np.log(rate / (1.0 - rate)) - np.log(choices - 1))[:, None]
        allowed = seen.allowed[operator, lane].copy()
        allowed[:, 0] &= operator > 0
        allowed[:, 1:] &= (left > 0.0)[:, None]
        allowed[~allowed.any(axis=1)] = True  # no way is left: the plan will be refused, not this sampler
        score[~allowed] = -np.inf
        score -= score.max(axis=1, keepdims=True)
        chance = np.exp(score)
        chance /= chance.sum(axis=1, keepdims=True)
        if given is None:
            action = np.minimum((chance.cumsum(axis=1) < uniform[:, operator, None]).sum(axis=1), choices - 1)
        else:
            action = given[:, operator]
        probabilities[:, operator], actions[:, operator] = chance, action
        cut = action > 0
        lane = np.where(cut, action - 1, lane)
        parts, began = parts + cut, np.where(cut, operator, began)
    return Rollout(actions, inputs, probabilities)


def gradient(weights: Weights, rollout: Rollout, advantage: _Array, entropy: float) -> Weights:
    """Return the direction in which expected advantage, and entropy times its weight, grow the fastest.

    The gradient of the expected advantage is the mean of ``advantage · ∇ log π`` (Williams 1992, eq. 11, with the
    characteristic eligibilities of section 5); for a softmax over scores ``∇ log π(a) = 1[a] - π``. The entropy ``H``
    of a decision has ``∂H/∂score = -π (log π + H)`` (its use: Williams and Peng 1991; Mnih et al. 2016, section 4).

    Args:
        advantage: shape ``(B,)``: reward less the baseline, which keeps the gradient unbiased.
    """
    chance = rollout.probabilities
    logs = np.log(np.maximum(chance, 1e-300))
    own = -(chance * logs).sum(axis=2, keepdims=True)
    by_score = -chance * advantage[:, None, None]
    np.put_along_axis(
        by_score,
        rollout.actions[:, :, None],
        np.take_along_axis(by_score, rollout.actions[:, :, None], axis=2) + advantage[:, None, None],
        axis=2,
    )
    by_score -= entropy * chance * (logs + own)
    by_score = (by_score / len(chance)).ravel()
    x = rollout.inputs.reshape(len(by_score), -1)
    hidden = np.tanh(x @ weights.inner + weights.bias)
    inside = by_score[:, None] * weights.out * (1.0 - hidden**2)
    return Weights(x.T @ inside, inside.sum(axis=0), by_score @ hidden)
