"""A study in optuna-dashboard: its trials, and the report with its plots as a note, all in a temporary copy."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.report.data import Study, read_study
from optimizer.report.markdown import render
from optimizer.report.study import study_document
from optimizer.report.svg import standalone
from search_spaces.core.errors import UnavailableError, needs_extra, reason_of

if TYPE_CHECKING:
    import optuna
    from optuna.artifacts import FileSystemArtifactStore
    from optuna.distributions import BaseDistribution

HOST = "127.0.0.1"


def export(study: Study) -> optuna.Study:
    """Return an Optuna study in memory: trials of the space with their latency in ms, stages and origin.

    A plan outside of the space, as every layer by itself, is an attribute of the study. Parameters range over the
    values of the trials, so that studies of any space are shown, even if their models are gone.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    from optimizer.samplers import quiet_optuna

    quiet_optuna()
    distributions = _distributions([trial.params for trial in study.trials])
    made = optuna.create_study(study_name=str(study.manifest["study"]), direction="minimize")
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        made.set_metric_names(["latency, ms"])
    for trial in study.trials:
        value_ms = trial.median_s * 1e3 if trial.measurement else None
        if set(trial.params) != set(distributions):
            outside = {"plan": trial.plan.to_json(), "latency_ms": value_ms}
            made.set_user_attr(f"{trial.origin} ({trial.plan.digest[:8]})", outside)
            continue
        attributes = {
            "proposed by": trial.origin,
            "stages": len(trial.plan.stages),
            "plan": json.dumps(trial.plan.to_json()["stages"]),
            "stopped early": trial.raced,
            "failure": trial.failure,
        }
        state, params = TrialState.COMPLETE if trial.measurement else TrialState.FAIL, dict(trial.params)
        kept = create_trial(
            state=state, value=value_ms, params=params, distributions=distributions, user_attrs=attributes
        )
        made.add_trial(kept)
    return made


def _distributions(params: Sequence[Mapping[str, Any]]) -> dict[str, BaseDistribution]:
    """Return each parameter of the space with the range of its values in the trials."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    names = next((each.keys() for each in reversed(params) if each), ())
    taken = {name: {each[name] for each in params if each.keys() == names} for name in names}
    return {
        name: IntDistribution(min(values), max(values))
        if all(isinstance(value, int) for value in values)
        else CategoricalDistribution(sorted(values, key=str))
        for name, values in taken.items()
    }


def annotate(made: optuna.Study, study: Study, folder: Path) -> FileSystemArtifactStore:
    """Give an exported study the report as its note; return the store of the plots, which are files in ``folder``.

    Raises:
        UnavailableError: the extra ``dashboard`` is not installed.
    """
    with needs_extra("optimize dashboard", "dashboard"):
        import optuna_dashboard
        from optuna_dashboard.artifact import get_artifact_path
    from optuna.artifacts import FileSystemArtifactStore, upload_artifact

    document = study_document(study)
    store = FileSystemArtifactStore(folder)
    note = render(document, "plots")
    for figure in document.figures:
        picture = folder / f"{figure.name}.svg"
        picture.write_text(standalone(figure.svg), encoding="utf-8")
        name = upload_artifact(artifact_store=store, file_path=str(picture), study_or_trial=made)
        note = note.replace(f"](plots/{figure.name}.svg)", f"]({get_artifact_path(made, name)})")
    optuna_dashboard.save_note(made, note)
    return store


def serve(run: Path, port: int, ready: Callable[[str], object]) -> None:
    """Show a study at ``http://127.0.0.1:port``, which is passed to ``ready``, until interrupted.

    Raises:
        RunFolderError: it is no finished run folder.
        UnavailableError: the extra ``dashboard`` is not installed, or the port is in use.
    """
    study = read_study(run)
    made = export(study)
    with tempfile.TemporaryDirectory(prefix="optimize-dashboard-") as folder:
        store = annotate(made, study, Path(folder))
        import optuna_dashboard

        ready(f"http://{HOST}:{port}")
        try:
            optuna_dashboard.run_server(made._storage, HOST, port, store)  # noqa: SLF001 - not public otherwise
        except OSError as error:
            raise UnavailableError(f"port {port} cannot be used: {reason_of(error)}", "give another --port") from error
