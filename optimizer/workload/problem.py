"""Problem of a study of several models, read from its settings and made ready for the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evaluators.base import Evaluator
from evaluators.objectives import Objective
from evaluators.workload.objectives import WorkloadPricing, find_workload_objective
from evaluators.workload.outcome import Objective as OfOutcome
from optimizer.devices import choose_platform, go_to, model_of, with_powers
from optimizer.model.baselines import Baseline
from optimizer.study.config import StudyConfig, parse_powers, with_freedoms
from optimizer.workload.baselines import baseline_processors, workload_baselines
from optimizer.workload.ranks import choices_of, with_errors
from optimizer.workload.variants import Variants
from search_spaces.core.errors import UsageError
from search_spaces.core.joined_graph import JoinedGraph, merge
from search_spaces.core.platform import Platform
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import RANKED_ERROR, Workload, names_file, with_given, workload_of
from search_spaces.core.workload_file import read_workload
from search_spaces.rewrites.tucker_ranks import RankChoices
from search_spaces.spaces.registry import make_workload_space
from search_spaces.spaces.workload_space import WorkloadSpace


@dataclass(slots=True)
class Problem:
    """A workload with its models, space and baselines.

    Attributes:
        config: the settings, with the freedoms that ``exact`` stands for.
        platform: of the space and of the baselines.
        choices: client that may be decomposed → ranks that its convolutions may have.
        variants: decomposed models of the space; None if none may be decomposed, or before they are found.
    """

    config: StudyConfig
    workload: Workload
    joined: JoinedGraph
    space: WorkloadSpace
    platform: Platform
    objectives: tuple[Objective, ...]
    baselines: tuple[Baseline, ...]
    choices: dict[int, RankChoices] = field(default_factory=dict)
    variants: Variants | None = None

    @property
    def objective(self) -> OfOutcome:
        """The figure that runs return, from which, or beside which, the objectives are computed."""
        return WorkloadPricing(self.objectives[0], self.platform, {}).of_run


def read_problem(config: StudyConfig, evaluator: Evaluator, workload: Workload | None = None) -> Problem:
    """Return the problem of a study of several models.

    Args:
        workload: that of the settings, if it was read already.

    Raises:
        UsageError: the workload, a model, a platform or a setting is wrong.
        UnavailableError: a processor cannot be used here, or the evaluator runs no workloads.
    """
    if not evaluator.capabilities.workloads:
        raise UsageError(
            f"--evaluator {config.evaluator}: it runs one model at a time",
            "give litert, cuda, cost-model, table, remote, or a single --model",
        )
    if config.deadline is not None:
        raise UsageError(
            "--deadline is not supported with several models", "set deadline_ms of each in the workload's file"
        )
    if len(config.objective) > 1 and config.sampler.partition("@")[0] == "reinforce":
        raise UsageError("--sampler reinforce supports one objective", "give --sampler auto, or one --objective")
    go_to(evaluator, config)
    if workload is None:
        workload = _asked(config)
    workload = with_errors(workload, config)
    known = {c.source: model_of(evaluator, c, config) for c in workload.clients}
    graphs = [known[c.source] for c in workload.clients]
    parts = [(i.name, graphs[i.client]) for i in workload.instances]
    joined = merge(workload.name, parts)
    found = choose_platform(evaluator, config.processors, config.platform, allow_fallback=config.allow_fallback)
    found = with_powers(found, parse_powers(config.power))
    config = with_freedoms(config, graphs, found)
    space = make_workload_space(config.allow, workload, joined, with_pools(found), config.max_stages)
    threads = config.evaluator == "litert"
    processes = evaluator.capabilities.sliced_processors
    objectives = workload_objectives(config.objective)
    if any(o.name == "misses" for o in objectives) and not workload.deadlines:
        raise UsageError("--objective misses: no model has a deadline", "set deadline_ms in the workload's file")
    # The busy time of processes that share cores is not known, and no state names them.
    if config.state or any(o.aggregation == "sum" for o in objectives):
        threads = processes = False
    named = workload_baselines(space, threads=threads, processes=processes)
    processors = baseline_processors(space, threads=threads, processes=processes)
    return Problem(config, workload, joined, space, processors, objectives, named, choices_of(workload, graphs))


def _asked(config: StudyConfig) -> Workload:
    """Return the workload that the command line names, from its file or from words."""
    most_error = RANKED_ERROR if config.max_error is None else config.max_error
    found = read_workload(Path(config.model), most_error) if names_file(config.model) else workload_of(config.model)
    found = found if config.rate is None else found.at_rate(config.rate)
    return replace(found, clients=with_given(found.clients, config.given))


def workload_objectives(names: Sequence[str]) -> tuple[Objective, ...]:
    """Return the objectives of several models.

    Raises:
        UsageError: a name is unknown, or given twice.
    """
    found = tuple(find_workload_objective(name) for name in names)
    if len({objective.name for objective in found}) < len(found):
        raise UsageError(f"--objective {', '.join(names)}: one is given twice", "give each once")
    return found
