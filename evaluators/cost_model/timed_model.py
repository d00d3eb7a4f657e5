"""A model whose operators were timed within it, and which was timed as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evaluators.cost_model.columns import Array
from evaluators.cost_model.features import OperatorFeatures
from evaluators.cost_model.fit import WholeModel
from evaluators.cost_model.recent import with_duties


@dataclass(frozen=True, slots=True)
class TimedModel:
    """One model on one processor.

    Attributes:
        name, family: models of one family share what they are built of, and are kept out of a fit together.
        features: of its operators.
        operator_s: what each takes within the model, shape ``(n,)``; NaN where that is not known.
        whole_s: of the model as one stage; NaN where that was not measured.
    """

    name: str
    family: str
    features: tuple[OperatorFeatures, ...]
    operator_s: Array
    whole_s: float

    def at_their_pace(self) -> list[OperatorFeatures]:
        """Return the features, each with the time from one inference to the next."""
        pace_s = self.whole_s if np.isfinite(self.whole_s) else float(np.nansum(self.operator_s))
        return with_duties([replace(f, interval_s=pace_s) for f in self.features], self.operator_s)

    @property
    def whole(self) -> WholeModel:
        """The model without its operators' times."""
        return WholeModel(self.name, self.family, self.features, self.whole_s)

    @property
    def sum_s(self) -> float:
        """The time of all operators that are not free; NaN where one is not known."""
        return float(sum(s for f, s in zip(self.features, self.operator_s, strict=True) if not f.free))
