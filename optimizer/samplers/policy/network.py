"""A policy over the choices of a space's parameters, and its gradient; numpy only.

Each parameter is decided by a softmax over its choices. The score of a choice is the model's prior
(:class:`~optimizer.samplers.policy.features.Choices`), plus the output of a network with one hidden layer for its
features, plus a preference of its own, learnt only within a study. The network's weights are shared by all parameters,
graphs and devices.
"""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimizer.samplers.policy.features import NAMES, Choices, softmax
from search_spaces.core.bounded import read_bounded
from search_spaces.core.errors import UsageError, reason_of

SCHEMA_VERSION = 2
HIDDEN = 16
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
    """Weights of the network: ``score = out · tanh(inner · x + bias)``.

    Attributes:
        inner: shape ``(F, H)``.
        bias, out: shape ``(H,)``.
    """

    inner: _Array
    bias: _Array
    out: _Array

    @classmethod
    def new(cls, seed: int) -> Weights:
        """Return weights of an untrained policy: all scores are 0."""
        rng = np.random.default_rng([seed, 77])
        return cls(rng.standard_normal((len(NAMES), HIDDEN)) / np.sqrt(len(NAMES)), np.zeros(HIDDEN), np.zeros(HIDDEN))

    def arrays(self) -> tuple[_Array, _Array, _Array]:
        """Return the three arrays."""
        return self.inner, self.bias, self.out

    def scores(self, features: _Array) -> _Array:
        """Return the score of each choice."""
        found: _Array = np.tanh(features @ self.inner + self.bias) @ self.out
        return found

    def slopes(self, features: _Array, by_score: _Array) -> Weights:
        """Return the gradient for the weights, given the derivative with respect to each choice's score."""
        hidden = np.tanh(features @ self.inner + self.bias)
        inside = by_score[:, None] * self.out * (1.0 - hidden**2)
        return Weights(features.T @ inside, inside.sum(axis=0), by_score @ hidden)

    def save(self, path: Path) -> None:
        """Write the weights as ``.npz``, with the names of their features.

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
            UsageError: the file cannot be read, is not a policy, or is for other features than this version has.
        """
        try:
            # Read the whole file first: numpy leaves a file open that is not an archive.
            packed = io.BytesIO(read_bounded(path))
            with zipfile.ZipFile(packed) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > _MOST_NBYTES:
                    raise ValueError("too large")
            with np.load(packed, allow_pickle=False) as content:
                version, names = int(content["schema_version"]), tuple(str(n) for n in content["features"])
                found = cls(*(np.asarray(content[name], dtype=np.float64) for name in ("inner", "bias", "out")))
        except OSError as error:
            raise UsageError(f"{path}: not a policy: {reason_of(error)}", _MAKE_ONE) from error
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


def draw(logits: _Array, choices: Choices, count: int, rng: np.random.Generator) -> _Ints:
    """Return ``count`` draws of a choice for each parameter: shape ``(count, parameters)``, indices of all choices."""
    noisy = logits + rng.gumbel(size=(count, len(logits)))
    ends = [*choices.first[1:].tolist(), len(logits)]
    return np.stack([a + noisy[:, a:b].argmax(axis=1) for a, b in zip(choices.first.tolist(), ends, strict=True)], 1)


def gradient(logits: _Array, choices: Choices, taken: _Ints, advantage: _Array, entropy: float) -> _Array:
    """Return the direction of the logits in which advantage, and entropy times its weight, grow fastest.

    The gradient of the expected advantage is the sum of ``advantage · ∇ log π`` (Williams 1992, eq. 11); for a softmax
    ``∇ log π(a) = 1[a] - π``. The entropy ``H`` of a decision has ``∂H/∂logit = -π (log π + H)`` (its use: Mnih et al.
    2016, section 4).

    Args:
        taken: shape ``(B, parameters)``, as :func:`draw` returns it.
        advantage: shape ``(B,)``.
    """
    chance = softmax(logits, choices.first, choices.of)
    found = -chance * float(advantage.sum())
    np.add.at(found, taken.ravel(), np.repeat(advantage, taken.shape[1]))
    logs = np.log(np.maximum(chance, 1e-300))
    own = -np.add.reduceat(chance * logs, choices.first)[choices.of]
    direction: _Array = found - entropy * chance * (logs + own)
    return direction
