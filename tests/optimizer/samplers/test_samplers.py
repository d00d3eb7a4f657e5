import logging
import subprocess
import sys
import warnings
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from optimizer.samplers import DEFAULT, SAMPLERS, make_sampler, quiet_optuna
from optimizer.samplers.foreign import ForeignSampler
from optimizer.samplers.stateless import FixedTpeSampler
from search_spaces.core.errors import UsageError
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import ChainSpace
from tests.support.sentences import fails
from tests.support.strategies import chain_graph

_PLATFORM = Platform("p", tuple(Processor(n, "cpu", {}, n) for n in ("cpu", "gpu", "npu")))
_SPACE = ChainSpace(chain_graph(22), _PLATFORM, 4)
_RESUMING = sorted(name for name, kind in SAMPLERS.items() if kind.resumes and kind.requires != "torch")


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.samplers.is_allowed", lambda _: True)


class NotASampler:
    def __init__(self, seed: int) -> None: ...


class Seedless(optuna.samplers.RandomSampler):
    def __init__(self) -> None:
        super().__init__(seed=0)


def _new_study() -> optuna.Study:
    quiet_optuna()
    return optuna.create_study()


def _tell(study: optuna.Study, trial: optuna.Trial) -> None:
    """Give a trial the value that its parameters have; every ninth trial fails."""
    if trial.number % 9 == 8:
        study.tell(trial, state=TrialState.FAIL)
    else:
        params = trial.params
        study.tell(
            trial, sum(params[f"cut_{i}"] * i for i in (1, 2, 3)) + params["stages"] * len(params["processor_1"])
        )


def _go_on(study: optuna.Study, name: str, seed: int, until: int) -> None:
    distributions = dict(_SPACE.distributions())
    for number in range(len(study.trials), until):
        study.sampler = make_sampler(name, seed, number)
        if number in (0, 5):
            study.enqueue_trial(_SPACE.encode(_SPACE.plan_at(number)))
        _tell(study, study.ask(distributions))


def _rebuilt(trials: list[FrozenTrial]) -> optuna.Study:
    study = _new_study()
    for t in trials:
        study.add_trial(create_trial(state=t.state, params=t.params, distributions=t.distributions, value=t.value))
    return study


@pytest.mark.parametrize("name", _RESUMING)
def test_a_study_rebuilt_from_its_trials_goes_on_as_if_uninterrupted(name: str) -> None:
    whole = _new_study()
    _go_on(whole, name, seed=3, until=66)
    for interrupted in (1, 7, 19, 20, 27, 40, 55, 61):
        again = _rebuilt(whole.trials[:interrupted])
        _go_on(again, name, seed=3, until=min(interrupted + 6, 66))
        expected = [t.params for t in whole.trials[: len(again.trials)]]
        assert [t.params for t in again.trials] == expected


@pytest.mark.parametrize("name", _RESUMING)
def test_the_seed_decides_what_is_proposed(name: str) -> None:
    runs = []
    for seed in (0, 0, 1):
        study = _new_study()
        _go_on(study, name, seed, until=30)
        runs.append([t.params for t in study.trials])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len({_SPACE.decode(params) for params in runs[0]}) > 12


@pytest.mark.parametrize("name", _RESUMING)
def test_nothing_reaches_the_terminal(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    study = _new_study()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _go_on(study, name, seed=0, until=45)
    assert not caught
    assert capfd.readouterr() == ("", "")


@given(st.data(), st.integers(0, 99))
def test_quasi_random_points_lie_in_any_space(data: st.DataObject, seed: int) -> None:
    low, size = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))
    step = data.draw(st.integers(1, 3))
    space: dict[str, optuna.distributions.BaseDistribution] = {
        "int": IntDistribution(low, low + size * step, step=step),
        "log int": IntDistribution(low, low + size, log=True),
        "float": FloatDistribution(low, low + size),
        "log float": FloatDistribution(low, low + size, log=True),
        "step float": FloatDistribution(0.0, 0.25 * size, step=0.25),
        "category": CategoricalDistribution([f"c{i}" for i in range(size + 1)]),
    }
    study = _new_study()
    for number in range(5):
        study.sampler = make_sampler("qmc", seed, number)
        trial = study.ask(space)
        assert all(d._contains(d.to_internal_repr(trial.params[name])) for name, d in space.items())
        study.tell(trial, 0.0)


def test_quasi_random_points_are_spread_evenly() -> None:
    study = _new_study()
    space: dict[str, Any] = {"x": IntDistribution(0, 7), "y": CategoricalDistribution(["a", "b"])}
    for number in range(32):
        study.sampler = make_sampler("qmc", 0, number)
        study.tell(study.ask(space), 0.0)
    later = [t.params for t in study.trials[16:]]  # an aligned run of 16 points has each of 8 by 2 cells once
    assert sorted((p["x"], p["y"]) for p in later) == [(x, y) for x in range(8) for y in "ab"]


def test_unknown_names_are_met_with_near_ones() -> None:
    with fails(UsageError):
        make_sampler("tpee", 0, 0)
    with fails(UsageError):
        make_sampler("", 0, 0)
    with fails(UsageError):
        make_sampler("AUTO", 0, 0)
    with fails(UsageError):
        make_sampler("optuna.samplers.RandomSampler", 0, 0)
    assert DEFAULT in SAMPLERS


@pytest.mark.parametrize("name", sorted(n for n, kind in SAMPLERS.items() if kind.requires))
def test_a_sampler_whose_package_is_missing_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with fails(UsageError):
        make_sampler(name, 0, 0)


def test_any_sampler_by_its_path() -> None:
    found = make_sampler("optuna.samplers:QMCSampler", 0, 0)
    assert isinstance(found, ForeignSampler)
    assert isinstance(found.inner, optuna.samplers.QMCSampler)
    first, same, other = (make_sampler("optuna.samplers:RandomSampler", 0, n) for n in (0, 0, 1))

    def draw(sampler: BaseSampler) -> Any:
        study = optuna.create_study(sampler=sampler)
        return study.ask({"x": FloatDistribution(0, 1)}).params

    assert draw(first) == draw(same) != draw(other)


@pytest.mark.parametrize(
    "path",
    [
        "no_such_module:X",
        "optuna.samplers:NoSuchSampler",
        ":",
        "optuna.samplers:",
        "optuna.samplers:BaseSampler",
        "os:getcwd",
        "tests.optimizer.samplers.test_samplers:NotASampler",
        "tests.optimizer.samplers.test_samplers:Seedless",
    ],
)
def test_what_is_no_sampler_is_refused(path: str) -> None:
    with fails(UsageError):
        make_sampler(path, 0, 0)


class Failing(optuna.samplers.RandomSampler):
    """Fails when it is asked."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:  # noqa: ARG002
        raise ZeroDivisionError("too far")


class Needy(optuna.samplers.RandomSampler):
    """Notices late what it lacks."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:  # noqa: ARG002
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


@pytest.mark.parametrize(
    "path",
    [
        "tests.optimizer.samplers.test_samplers:Failing",
        "tests.optimizer.samplers.test_samplers:Needy",
    ],
)
def test_what_a_sampler_from_elsewhere_raises_is_reported(path: str) -> None:
    study = optuna.create_study(sampler=make_sampler(path, 0, 0))
    with fails(UsageError):
        study.ask({"x": FloatDistribution(0, 1)})


def test_optuna_is_imported_only_when_it_is_needed() -> None:
    code = "import sys, optimizer.samplers; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_optuna_keeps_its_log_to_itself(capfd: pytest.CaptureFixture[str]) -> None:
    quiet_optuna()
    logging.getLogger("optuna").warning("not for people")
    optuna.create_study()
    assert capfd.readouterr() == ("", "")


def test_tpe_proposes_what_optunas_own_would() -> None:
    study = _new_study()
    _go_on(study, "tpe", 0, until=30)
    again = _rebuilt(study.trials)
    options: dict[str, Any] = {"multivariate": True, "constant_liar": False, "n_startup_trials": 20}
    proposals = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one, kind in ((study, FixedTpeSampler), (again, optuna.samplers.TPESampler)):
            one.sampler = kind(seed=7, n_ei_candidates=8, **options)
            proposals.append(one.ask(dict(_SPACE.distributions())).params)
    assert proposals[0] == proposals[1]


def test_cma_es_generations_are_those_of_optunas_own() -> None:
    """Optuna's keeps a pickle; ours tells the trials again. The distribution after 40 trials is the same."""
    pytest.importorskip("cmaes")
    from optimizer.samplers import stateless

    space: dict[str, optuna.distributions.BaseDistribution] = {
        name: FloatDistribution(-2.0, 5.0) for name in ("x", "y", "z")
    }
    theirs = _new_study()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.sampler = optuna.samplers.CmaEsSampler(seed=3, warn_independent_sampling=False)
    for _ in range(40):
        trial = theirs.ask(space)
        theirs.tell(trial, sum(trial.params[name] ** 2 for name in space))
    ours = _rebuilt(theirs.trials)
    ours.sampler = make_sampler("cmaes", 0, 40)
    ours.ask(space)
    _, mine = stateless._optimizers[ours]
    sampler: Any = theirs.sampler
    kept = sampler._restore_optimizer(theirs.trials)
    assert mine.generation == kept.generation == 39 // mine.population_size - 1 + (39 % mine.population_size > 0)
    assert mine.mean == pytest.approx(kept.mean)


def test_parameters_without_a_choice_are_no_trouble() -> None:
    one_processor = Platform("p", (Processor("cpu", "cpu", {}, "cpu"),))
    for max_stages in (1, 2):
        distributions = dict(ChainSpace(chain_graph(2), one_processor, max_stages).distributions())
        for name in _RESUMING:
            study = _new_study()
            for number in range(45):
                study.sampler = make_sampler(name, 0, number)
                study.tell(study.ask(distributions), 1.0)
