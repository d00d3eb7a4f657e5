"""The fit of a document's parameters to its figures, by weighted least squares on relative errors.

The loss is that of :func:`~evaluators.cost_model.fit.nonnegative_prices`, whose prices come out where predictions are
linear in them; here they may have any form, such as a plan whose stages run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from evaluators.cost_model.features import Array
from evaluators.cost_model.figures import Figure, Figures
from evaluators.cost_model.fit import REWEIGHTED, RIDGE, USUAL_ERROR
from evaluators.cost_model.plans import PlanSimulator
from evaluators.cost_model.transfers import Prices, prices
from search_spaces.rewrites.lower import Lowered


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fit of a document's parameters.

    Attributes:
        values: of the parameters.
        loss: by which fits with other choices are compared.
        allowed: parameter that no figure determines → the range in which all figures are fitted as well; its value is
            the middle.
        entangled: parameters of which figures determine combinations only.
        slopes: of each figure's prediction by each parameter in a range, relative and scaled, shape ``(n, k)``.
        used: the figures that it is fitted to.
    """

    values: dict[str, float]
    loss: float
    allowed: dict[str, tuple[float, float]]
    entangled: tuple[str, ...]
    slopes: Array
    used: tuple[int, ...]

    def determines(self, figure: int) -> bool:
        """Return whether the figures that it is fitted to determine the prediction of another one."""
        slope, known = self.slopes[figure], self.slopes[list(self.used)]
        left = slope - slope @ np.linalg.pinv(known, rcond=_RANK) @ known if slope.size and known.size else slope
        return bool(np.linalg.norm(left) <= _LEFT * np.linalg.norm(slope))


_RANK, _LEFT = 1e-5, 1e-3
_FLAT, _SAME = 1e-6, 1e-14  # a slope that is none; a squared relative error that is none
_HALVINGS = 60
_PROBES = 3  # at random, besides one for each parameter


class FiguresFit:
    """Fits a document's parameters to its figures.

    Prices of operators, stages and transfers are sums of a constant and of one share for each parameter, which are
    computed once; plans are simulated by their sum, as by the evaluator ``cost-model``.

    Args:
        document: complete.
        plans: of each figure, and of what is subtracted from it.

    Raises:
        ProfileError: some kernel has no price.
    """

    def __init__(self, document: Figures, plans: Sequence[tuple[Lowered, Lowered | None]]) -> None:
        self.document = document
        self._plans = [
            (one.in_place(document.platform), less and less.in_place(document.platform)) for one, less in plans
        ]
        self._names = list(document.parameters)
        of = document.parameters
        self._most = np.array([of[n].most or max(of[n].choices or (0.0,)) or 1.0 for n in self._names])
        self._tables: dict[tuple[str, str], _Tables] = {}
        for lowered in (each for pair in self._plans for each in pair if each is not None):
            if self._key(lowered) not in self._tables:
                self._tables[self._key(lowered)] = self._table(lowered)
        self._know_affine()
        told = [(f.ms, f.at_least_ms, f.at_most_ms) for f in self.figures]
        self.told_ms = np.array([next((t for t in each if t is not None), 0.0) for each in told])
        self.sense = np.array([float(least is not None) - float(most is not None) for _, least, most in told])

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures, in the order of the document."""
        return self.document.figures

    def _key(self, lowered: Lowered) -> tuple[str, str]:
        return lowered.graph.digest, repr(lowered.plan) if lowered.split else ""

    def _table(self, lowered: Lowered) -> _Tables:
        document, platform = self.document, self.document.platform

        def simulator(values: Array) -> PlanSimulator:
            profile = document.profile(dict(zip(self._names, map(float, values), strict=True)), {})
            costs = prices(profile, lowered.graph, platform, lowered.shares)
            return PlanSimulator(lowered.graph, platform, costs, lowered.held)

        base = simulator(np.zeros_like(self._most)).prices
        return _Tables(simulator(self._most), base, [simulator(row).prices for row in np.diag(self._most)], self._most)

    def predict_ms(self, values: Mapping[str, float]) -> tuple[Array, Array]:
        """Return the prediction of each figure, and of what is subtracted in it, 0 where nothing is; both ``(n,)``."""
        point = np.array([values[name] for name in self._names])
        found: Array = self._base + np.tensordot(point, self._shares, axes=1)
        if self._curved.any():
            found[self._curved] = self._simulated(point, self._curved)
        return found[:, 0] - found[:, 1], found[:, 1]

    def _know_affine(self) -> None:
        """Find the predictions that are a constant and a share for each parameter: of stages one after another, say."""
        every = np.ones(len(self._plans), dtype=bool)
        random = np.random.default_rng(0).random((_PROBES, len(self._names))) * self._most
        base, *found = (self._simulated(p, every) for p in (np.zeros_like(self._most), *np.diag(self._most), *random))
        count = len(self._names)
        self._base = base
        self._shares = np.array([(f - base) / most for f, most in zip(found[:count], self._most, strict=True)])
        self._shares = self._shares.reshape(count, *base.shape)
        off = [
            abs(base + np.tensordot(p, self._shares, axes=1) - f) for p, f in zip(random, found[count:], strict=True)
        ]
        sure = np.array([o <= 1e-9 * f for o, f in zip(off, found[count:], strict=True)])
        self._curved: NDArray[np.bool_] = np.logical_not(sure.all(axis=(0, 2)))

    def _simulated(self, point: Array, which: NDArray[np.bool_]) -> Array:
        """Return the predictions of some figures, and of what is subtracted, shape ``(n, 2)``."""
        simulators = {key: table.simulator(point) for key, table in self._tables.items()}

        def took_ms(lowered: Lowered | None) -> float:
            return 0.0 if lowered is None else simulators[self._key(lowered)].latency_s(lowered.plan) * 1e3

        wanted = (self._plans[number] for number in np.flatnonzero(which).tolist())
        return np.array([[took_ms(each) for each in pair] for pair in wanted])

    def fit(self, without: int | None = None, starts: Sequence[Mapping[str, float]] = ()) -> Fitted:
        """Return the best fit to all figures, or to all but one.

        Args:
            starts: from where it is sought, too, beside the middle of the ranges and the fit without bounds.
        """
        of = self.document.parameters
        used = tuple(i for i, f in enumerate(self.figures) if f.fitted and i != without)
        bounds = tuple(i for i, f in enumerate(self.figures) if f.bound)
        chosen = [[(n, value) for value in of[n].choices or ()] for n in self._names if of[n].choices]
        problems = [_Problem(self, used, bounds, dict(pairs)) for pairs in product(*chosen)]
        if bounds:
            starts = [*starts, *(_Problem(self, used, (), p.chosen).solved().values for p in problems)]
        tried = [
            (p, start)
            for p in problems
            for start in (None, *starts)
            if start is None or p.chosen.items() <= start.items()
        ]
        return min((problem.solved(start) for problem, start in tried), key=lambda found: found.loss)


class _Problem:
    """The fit of the parameters in ranges, for one combination of choices.

    Args:
        used, bounds: figures that are fitted, and those that bound the fit.
        chosen: values of the other parameters.
    """

    def __init__(
        self, fit: FiguresFit, used: Sequence[int], bounds: Sequence[int], chosen: Mapping[str, float]
    ) -> None:
        self._fit, self._used, self._rows, self.chosen = fit, [*used], [*used, *bounds], chosen
        self._free = [n for n in fit.document.parameters if n not in chosen]
        ranges = [fit.document.parameters[n] for n in self._free]
        self._least, self._most = np.array([r.least for r in ranges]), np.array([r.most or 0.0 for r in ranges])
        self._start = np.array([r.start for r in ranges])
        self._sense = fit.sense[self._rows]

    def values(self, theta: Array) -> dict[str, float]:
        """Return all parameters, given those in ranges."""
        found = dict(zip(self._free, map(float, theta), strict=True))
        return {n: found[n] if n in found else self.chosen[n] for n in self._fit.document.parameters}

    def _scale_ms(self, theta: Array) -> Array:
        # The error of a difference is relative to the longer one of both times.
        minus = self._fit.predict_ms(self.values(theta))[1]
        scale: Array = np.maximum(self._fit.told_ms + minus, 1e-9)
        return scale

    def _errors(self, theta: Array, scale_ms: Array) -> Array:
        """Return the relative error of each figure that is used, and by how much each bound is broken."""
        error = (self._fit.predict_ms(self.values(theta))[0] - self._fit.told_ms)[self._rows] / scale_ms[self._rows]
        return np.where(self._sense * error <= 0, error, 0.0)

    def _slopes(self, theta: Array, scale_ms: Array) -> Array:
        """Return the slope of the relative prediction of every figure by each parameter, shape ``(n, k)``."""
        steps = 1e-7 * np.maximum(theta, 1e-6 * self._most)
        points = [theta, *(theta + row for row in np.diag(steps))]
        at, *moved = (self._fit.predict_ms(self.values(point))[0] for point in points)
        rows = [(each - at) / (scale_ms * step) for each, step in zip(moved, steps, strict=True)]
        return np.array(rows).reshape(len(steps), len(at)).T

    def solved(self, start: Mapping[str, float] | None = None) -> Fitted:
        """Return the fit that is found from some values on, or from the middle of the ranges."""
        theta = self._start if start is None else np.array([start[name] for name in self._free])
        scale = self._scale_ms(theta)
        weight = np.ones(len(self._rows)) if start is None else self._weights(theta, scale)
        usual, centre = 1.0 / self._most, np.zeros_like(theta)
        for _ in range(REWEIGHTED + 1 if len(theta) else 0):
            found = self._slopes(theta, scale)[self._rows]
            share = np.sqrt((found**2).sum(axis=0) / np.maximum((found != 0).sum(axis=0), 1))
            usual = np.where(share > 0, share, usual)
            theta = self._reweighted(theta, scale, weight, usual, centre)
            scale = self._scale_ms(theta)
            weight = self._weights(theta, scale)
            # As many numbers as figures: nothing is averaged, and the ridge must not move the solution.
            centre = theta if len(self._used) <= len(theta) else centre
        begun = theta if start is None else np.array([start[name] for name in self._free])
        if self._loss(begun, self._scale_ms(begun)) < self._loss(theta, scale):
            theta, scale = begun, self._scale_ms(begun)  # reweighting led away
        steep = self._slopes(theta, scale) / usual
        known = steep[self._used]
        flat = [j for j in range(len(theta)) if np.abs(known[:, j]).max(initial=0.0) < _FLAT]
        allowed = {}
        for j in flat:
            for _ in range(2):  # the second time from a point inside
                low, high = (self._edge(theta, scale, j, end) for end in (self._least[j], self._most[j]))
                theta = np.where(np.arange(len(theta)) == j, (low + high) / 2, theta)
            allowed[self._free[j]] = (low, high)
        lost = np.diag(np.eye(len(theta)) - np.linalg.pinv(known, rcond=_RANK) @ known) if known.size else np.ones(0)
        entangled = tuple(n for j, n in enumerate(self._free) if j not in flat and known.size and lost[j] > _LEFT)
        return Fitted(self.values(theta), self._loss(theta, scale), allowed, entangled, steep, tuple(self._used))

    def _loss(self, theta: Array, scale_ms: Array) -> float:
        return float(np.log1p((self._errors(theta, scale_ms) / USUAL_ERROR) ** 2).sum())

    def _weights(self, theta: Array, scale_ms: Array) -> Array:
        weight: Array = 1.0 / np.sqrt(1.0 + (self._errors(theta, scale_ms) / USUAL_ERROR) ** 2)
        return weight

    def _reweighted(self, theta: Array, scale_ms: Array, weight: Array, usual: Array, centre: Array) -> Array:
        """Return the least squares with a ridge around ``centre``, each number scaled to its ``usual`` share."""
        from scipy.optimize import least_squares

        def residual(point: Array) -> Array:
            return np.append(weight * self._errors(point / usual, scale_ms), sqrt(RIDGE) * (point - centre * usual))

        limits = self._least * usual, self._most * usual
        first = np.clip(theta * usual, *limits)
        found = least_squares(residual, first, bounds=limits, method="dogbox", xtol=1e-12, ftol=1e-12, gtol=1e-12)
        point: Array = found.x
        return np.clip(point / usual, self._least, self._most)

    def _edge(self, theta: Array, scale_ms: Array, index: int, end: float) -> float:
        """Return how far a number may move towards ``end`` before the figures are fitted worse."""

        def loss(value: float) -> float:
            moved = np.where(np.arange(len(theta)) == index, value, theta)
            return float((self._errors(moved, scale_ms) ** 2).sum())

        inside = float(theta[index])
        most = loss(inside) + _SAME
        if loss(end) <= most:
            return end
        for _ in range(_HALVINGS):
            middle = (inside + end) / 2
            inside, end = (middle, end) if loss(middle) <= most else (inside, middle)
        return inside


class _Tables:
    """Prices of one graph as a sum of a constant and of a share for each parameter."""

    def __init__(self, simulator: PlanSimulator, base: Prices, probes: Sequence[Prices], most: Array) -> None:
        self._simulator = simulator
        self._shares: dict[str, tuple[Array, Array]] = {}
        for name in Prices.__slots__:
            whole, *tables = (getattr(each, name) for each in (simulator.prices, base, *probes))
            if whole is None or (tables[0] is not None and np.array_equal(whole, tables[0], equal_nan=True)):
                continue  # no parameter changes it
            first, *others = (np.zeros_like(whole) if table is None else table for table in tables)
            shares = [(table - first) / scale for table, scale in zip(others, most, strict=True)]
            self._shares[name] = first, np.array(shares)

    def simulator(self, point: Array) -> PlanSimulator:
        """Return the simulator, which simulates by these values of the parameters until the next call."""
        tables = {name: base + np.tensordot(point, shares, axes=1) for name, (base, shares) in self._shares.items()}
        self._simulator.reprice(replace(self._simulator.prices, **tables))
        return self._simulator
