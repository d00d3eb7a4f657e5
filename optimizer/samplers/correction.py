"""Corrects the model by measurements: a Bayesian linear model of its residuals, in closed form.

A measured plan returns the time of each stage and its latency. A stage's time is linear in what is unknown::

    t = overhead·(1 + v) + Σ m_o·(1 + u + w_o) + Σ m_o·i_o + (m_f + h_f)·(c + e_f)

with m the model's time of an operator on that kind of processor. Unknown are u and v (common to the processor: its
speed, and its cost of starting a stage), w_o (one operator), i_o (an operator whose predecessor in the order is in its
stage), and for the first operator f of a stage, by where the stage before it ran, c (common) and e_f (this operator);
h_f is the model's transfer there. The gaps between stages that wait for each other are linear in the transfers in the
same way. All weights are Gaussian a priori, so the posterior is a Gaussian process over stages (Rasmussen and Williams
2006, eq. 2.23-2.24), one for each kind of processor. Draws follow Matheron's rule: a draw of the prior, updated by its
residuals on the measurements (Wilson et al. 2020, eq. 9).

The model's error and the measurements' noise maximise the marginal likelihood (eq. 2.30) on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from optimizer.exact.chain_costs import ChainCosts
from optimizer.samplers.draws import Draws
from search_spaces.core.plan import Stage

_Array = NDArray[np.float64]

MODEL_ERRORS = (0.03, 0.08, 0.2, 0.4)
NOISES = (0.005, 0.015, 0.04)
INTERACTION = 0.5  # standard deviation of the interactions, as a share of the model's error
WHOLE = 0.5  # of the speed of a processor as a whole, likewise
OVERHEAD, TRANSFER = 0.5, 0.3
# Time of a refused operator, as a multiple of the whole model on all processors: finite, so that sums work.
REFUSED = 1e4
_LEAST_SHARE = 1e-3  # least noise, as a share of the model's value
_LEAST_NOISE = 1e-5  # relative to a stage's prior standard deviation; rounding hides smaller ones
MOST_PARTS = 400  # stages used for each kind of processor; more would take too long


@dataclass(slots=True)
class _Kind:
    """Features and residuals of the stages that ran on one kind of processor."""

    operators: list[_Array] = field(default_factory=list)
    together: list[_Array] = field(default_factory=list)
    shared: list[tuple[float, float, float]] = field(default_factory=list)
    entering: list[tuple[int, int, float]] = field(default_factory=list)  # first operator, origin, its time
    residual_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)


class Correction:
    """The posterior over the costs of operators, stages and transfers.

    Args:
        model: the prior; alike processors cost the same.
    """

    def __init__(self, model: ChainCosts) -> None:
        platform = model.platform
        likes = list(platform.classes())
        self._processor = {p.name: i for i, p in enumerate(platform.processors)}
        self._like = [likes.index(p.like) for p in platform.processors]
        self._member = [self._like.index(i) for i in range(len(likes))]
        finite = np.isfinite(model.operator_s)
        known = np.where(finite, model.operator_s, 0.0)
        self._refused_s = np.where(finite, 0.0, REFUSED * max(float(known.sum()), 1e-9))
        self._model = model
        self._operator_s = known[self._member]
        self._overhead_s = model.overhead_s[self._member] + 0.02 * self._operator_s.mean(axis=1)
        # Where the stage before ran: 0 the same processor, 1 + k another processor of kind k.
        self._origin = np.array(
            [[0 if i == j else 1 + self._like[i] for j in range(len(self._like))] for i in range(len(self._like))]
        )
        self._kinds = [_Kind() for _ in likes]
        self._marks: list[tuple[int, ...]] = [(0,) * len(likes)]
        transfer_s = np.where(np.isfinite(model.transfer_s), model.transfer_s, 0.0)
        # [kind, operator, origin]: time of the first operator of a stage, with the transfer to it.
        self._entry_s = np.repeat(self._operator_s[:, :, None], 1 + len(likes), axis=2)
        for of, origins in enumerate(self._origin):
            for to, origin in enumerate(origins):
                entry = self._operator_s[self._like[to]] + transfer_s[:, of, to]
                self._entry_s[self._like[to], :, origin] = entry
        self._transfer_scale = transfer_s + 0.02 * float(self._operator_s.mean())
        self._gaps: list[list[tuple[int, int, int]]] = []
        self._gap_s: list[float] = []
        self._gap_noise_s: list[float] = []
        self.model_error, self.noise = 0.2, 0.015
        self._chosen_from = 0

    def observe(
        self,
        stages: Sequence[Stage],
        stage_s: Sequence[float],
        gaps: Sequence[tuple[int, int]] = (),
        gap_s: float = 0.0,
        noise: float = 1.0,
    ) -> None:
        """Learn from a measured plan.

        Args:
            stages: of the plan, in its order.
            stage_s: time of each.
            gaps: pairs of stages, the second of which waited only for the transfer from the first.
            gap_s: time of all these transfers together.
            noise: of this measurement, as a multiple of the usual noise.
        """
        processors = [self._processor[s.processor] for s in stages]
        for index, (stage, took_s) in enumerate(zip(stages, stage_s, strict=True)):
            before = processors[index - 1] if index else None
            self._observe_part(stage.operators, processors[index], before, took_s, noise)
        if gaps:
            self._gaps.append([(stages[j].operators[0], processors[i], processors[j]) for i, j in gaps])
            known = sum(float(self._model.transfer_s[key]) for key in self._gaps[-1])
            self._gap_s.append(gap_s - known)
            self._gap_noise_s.append(noise * (0.03 * abs(gap_s) + 0.002 * sum(stage_s)))
        self._marks.append(tuple(len(kind.residual_s) for kind in self._kinds))

    def _observe_part(
        self, operators: tuple[int, ...], processor: int, before: int | None, took_s: float, noise: float
    ) -> None:
        kind, like = self._kinds[self._like[processor]], self._like[processor]
        index = np.array(operators, dtype=np.intp)
        alone, together = np.zeros(self._operator_s.shape[1]), np.zeros(self._operator_s.shape[1])
        alone[index] = self._operator_s[like, index]
        follows = index[1:][np.diff(index) == 1]
        together[follows] = self._operator_s[like, follows]
        origin = -1 if before is None else int(self._origin[before, processor])
        entry_s = 0.0 if before is None else float(self._entry_s[like, index[0], origin])
        kind.operators.append(alone)
        kind.together.append(together)
        kind.shared.append((float(alone.sum()), float(self._overhead_s[like]), entry_s))
        kind.entering.append((int(index[0]), origin, entry_s))
        kind.residual_s.append(took_s - float(alone.sum() + self._model.overhead_s[processor]))
        kind.measured_s.append(max(took_s, _LEAST_SHARE * float(alone.sum())))
        kind.noise.append(noise)

    @property
    def plans(self) -> int:
        """Number of plans that were learnt from."""
        return len(self._marks) - 1

    def draw(self, count: int, rng: np.random.Generator) -> Draws:
        """Return the posterior mean and ``count`` draws of the posterior."""
        processors, operators = self._model.operator_s.shape
        origins = 1 + len(self._kinds)
        shape = count + 1
        operator_s = np.empty((shape, len(self._kinds), operators))
        together_s, overhead_s = np.empty_like(operator_s), np.empty((shape, len(self._kinds)))
        entering_s = np.empty((shape, len(self._kinds), operators, origins))
        for like, kind in enumerate(self._kinds):
            alone, together, shared, entering = self._weights(kind, shape, origins, rng)
            base = self._operator_s[like]
            operator_s[:, like] = np.maximum(base * (1.0 + shared[:, :1] + alone), 0.05 * base)
            together_s[:, like] = np.maximum(base * together, -0.9 * operator_s[:, like])
            overhead_s[:, like] = np.maximum(
                self._model.overhead_s[self._member[like]] + self._overhead_s[like] * shared[:, 1], 0.0
            )
            entering_s[:, like] = self._entry_s[like] * (shared[:, 2, None, None] + entering)
        like_of = self._like
        entering = np.stack(
            [
                np.stack([entering_s[:, like_of[to], :, self._origin[of, to]] for to in range(processors)], axis=-1)
                for of in range(processors)
            ],
            axis=2,
        )
        together_s[:, :, 0] = 0.0
        return Draws(
            operator_s[:, like_of] + self._refused_s,
            together_s[:, like_of],
            overhead_s[:, like_of],
            entering,
            self._transfers(shape, rng),
        )

    def choose(self, plans: int) -> None:
        """Choose the model's error and the noise under which the first ``plans`` measured plans are most likely."""
        if plans == self._chosen_from:
            return
        self._chosen_from = plans
        grid = list(product(MODEL_ERRORS, NOISES))
        likely = [-(math.log(error / 0.2) ** 2 + math.log(noise / 0.015) ** 2) / 2 for error, noise in grid]
        for kind, count in zip(self._kinds, self._marks[plans], strict=True):
            if count:
                which = slice(max(0, count - MOST_PARTS // 2), count)
                likely = [sum(pair) for pair in zip(likely, self._log_likelihoods(kind, which, grid), strict=True)]
        self.model_error, self.noise = grid[likely.index(max(likely))]

    def _log_likelihoods(self, kind: _Kind, which: slice, grid: Sequence[tuple[float, float]]) -> list[float]:
        measured_s = np.array(kind.noise[which]) * np.array(kind.measured_s[which])
        residual = np.array(kind.residual_s[which])
        by_error, fixed = _grams(kind, which)
        found = []
        for error, noise in grid:
            gram = error**2 * by_error + fixed + np.diag((noise * measured_s) ** 2)
            factor = _factored(gram)
            fit = float(residual @ cho_solve(factor, residual, check_finite=False))
            found.append(-fit / 2 - float(np.log(np.diag(factor[0])).sum()))
        return found

    def _weights(
        self, kind: _Kind, shape: int, origins: int, rng: np.random.Generator
    ) -> tuple[_Array, _Array, _Array, _Array]:
        """Return draws of the weights of operators, interactions, shared causes and entering; the first is the mean."""
        scale_w, scale_i = self.model_error, INTERACTION * self.model_error
        scale_u = np.array([WHOLE * self.model_error, OVERHEAD, INTERACTION * self.model_error])
        operators = self._operator_s.shape[1]
        alone = scale_w * _random(rng, shape, operators)
        together = scale_i * _random(rng, shape, operators)
        shared = scale_u * _random(rng, shape, 3)
        entering = scale_i * _random(rng, shape, operators, origins)
        if not kind.residual_s:
            return alone, together, shared, entering
        keep = slice(-MOST_PARTS, None)
        a, b, c = np.array(kind.operators[keep]), np.array(kind.together[keep]), np.array(kind.shared[keep])
        first, origin, entry_s = (np.array(x) for x in zip(*kind.entering[keep], strict=True))
        first, origin = first.astype(np.intp), origin.astype(np.intp)
        residual = np.array(kind.residual_s[keep])
        noise_s = self.noise * np.array(kind.noise[keep]) * np.array(kind.measured_s[keep])
        by_error, fixed = _grams(kind, keep)
        factor = _factored(self.model_error**2 * by_error + fixed + np.diag(noise_s**2))
        predicted = alone @ a.T + together @ b.T + shared @ c.T + entering[:, first, origin] * entry_s
        predicted += noise_s * _random(rng, shape, len(residual))
        alpha = cho_solve(factor, (residual - predicted).T).T
        alone = alone + scale_w**2 * alpha @ a
        together = together + scale_i**2 * alpha @ b
        shared = shared + scale_u**2 * (alpha @ c)
        update = alpha * entry_s * scale_i**2
        for index in range(len(residual)):
            if origin[index] >= 0:
                entering[:, first[index], origin[index]] += update[:, index]
        return alone, together, shared, entering

    def _transfers(self, shape: int, rng: np.random.Generator) -> _Array:
        """Return draws of the transfers, ``(S, n, P, P)``; the first is the mean."""
        model_s, scale_s = self._model.transfer_s, self._transfer_scale
        count, processors, _ = model_s.shape
        like = np.array(self._like)
        kinds = len(self._kinds)
        pair = (like[:, None] * kinds + like) * 2 + np.eye(processors, dtype=np.intp)
        own = TRANSFER * _random(rng, shape, count, 2 * kinds * kinds)
        link = TRANSFER * _random(rng, shape, 2 * kinds * kinds)
        if self._gaps:
            keep = slice(-MOST_PARTS, None)
            keys = [[(o, int(pair[i, j]), float(scale_s[o, i, j])) for o, i, j in gap] for gap in self._gaps[keep]]
            columns = {key: n for n, key in enumerate(dict.fromkeys((o, p) for gap in keys for o, p, _ in gap))}
            of_own, of_link = np.zeros((len(keys), len(columns))), np.zeros((len(keys), link.shape[1]))
            for row, gap in enumerate(keys):
                for o, p, scale in gap:
                    of_own[row, columns[o, p]] += scale
                    of_link[row, p] += scale
            where = np.array(list(columns), dtype=np.intp).reshape(len(columns), 2)
            noise_s = np.array(self._gap_noise_s[keep])
            gram = TRANSFER**2 * (of_own @ of_own.T + of_link @ of_link.T) + np.diag(noise_s**2 + 1e-24)
            predicted = own[:, where[:, 0], where[:, 1]] @ of_own.T + link @ of_link.T
            predicted += noise_s * _random(rng, shape, len(keys))
            alpha = cho_solve(_factored(gram), (np.array(self._gap_s[keep]) - predicted).T).T
            own[:, where[:, 0], where[:, 1]] += TRANSFER**2 * alpha @ of_own
            link += TRANSFER**2 * alpha @ of_link
        found: _Array = np.maximum(model_s + scale_s * (own[:, :, pair] + link[:, None, pair]), 0.0)
        return found


def _grams(kind: _Kind, which: slice) -> tuple[_Array, _Array]:
    """Return the prior covariance of stages without noise: the part per squared model error, and the rest."""
    a, b, c = np.array(kind.operators[which]), np.array(kind.together[which]), np.array(kind.shared[which])
    first, origin, entry_s = (np.array(x) for x in zip(*kind.entering[which], strict=True))
    same = (first[:, None] == first) & (origin[:, None] == origin)
    both = c[:, [0, 2]] * (WHOLE, INTERACTION)
    by_error = a @ a.T + INTERACTION**2 * (b @ b.T + same * np.outer(entry_s, entry_s)) + both @ both.T
    return by_error, OVERHEAD**2 * np.outer(c[:, 1], c[:, 1])


def _factored(covariance: _Array) -> tuple[_Array, bool]:
    """Return the Cholesky factor of a covariance, as :func:`scipy.linalg.cho_factor` does.

    Stages that are alike to the model and were measured too exactly make a covariance that is singular up to rounding.
    Then a little noise is added, relative to each stage's own variance.
    """
    try:
        factor, lower = cho_factor(covariance, lower=True)
    except LinAlgError:
        own = np.diag(covariance)
        more = np.where(own > 0.0, _LEAST_NOISE**2 * own, 1.0)
        factor, lower = cho_factor(covariance + np.diag(more), lower=True)
    return factor, lower


def _random(rng: np.random.Generator, shape: int, *rest: int) -> _Array:
    """Return standard normal numbers, zero for the first draw: that one is the mean."""
    found = rng.standard_normal((shape, *rest))
    found[0] = 0.0
    return found
