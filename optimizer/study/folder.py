"""The run folder of a study: its settings, machine, and everything that was measured.

::

    runs/vgg16-20260301-140312/
    ├── manifest.json   versions, machine, seed, command
    ├── config.yaml     the settings in full
    ├── trials.jsonl    the checked log, from which a study resumes
    ├── result.json     written at the end
    └── best/           the plan and its stage files
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from optimizer.files import disk_errors, is_temporary, write_atomic, write_json
from optimizer.provenance import provenance
from optimizer.study.log import LogContents, TrialLog, header, read_log
from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import OptimizeError, RunFolderError, UsageError
from search_spaces.core.yaml_file import read_settings
from search_spaces.models.zoo.names import is_name

if TYPE_CHECKING:
    from optimizer.study.config import StudyConfig

__all__ = ["RunFolder", "write_atomic", "write_json"]

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
CONFIG = "config.yaml"
_MOST_KEPT = 1_000_000  # a larger budget of a study that resumes must be given again
LOG = "trials.jsonl"
RUNTIME_LOG = "runtime.log"
INFEASIBLE = "infeasible"  # kind of the record that tells why a study has no result
RESULT = "result.json"
# Settings that decide which plans are proposed and what their figures mean; they are constant within a study.
_FIXED = (
    *("seed", "sampler", "max_stages", "evaluator", "objective", "processors", "allow", "state", "robust", "power"),
    "rate",
)
_MAX_MANIFEST_NBYTES = 16 << 20
_SHOWN_CHARACTERS = 80
_WRITABLE = "give --out a folder that you can write to"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a study is of; it is constant.

    Attributes:
        model_digest: of the graphs' structure.
        inputs_digest: of inputs that a person gave; "" without any.
        measured_on: processors that plans may name, each with its group of identical ones: another machine's of the
            same names are others.
    """

    model_digest: str
    inputs_digest: str = ""
    measured_on: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "measured_on": list(self.measured_on)}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An open run folder of one process.

    Attributes:
        path: the folder.
        config: the settings, with the name of the study filled in.
        log: open for new records.
        contents: what the log held; nothing for a new study.
        changes: what of machine and software changed since the study began, or was damaged; one line each.
    """

    path: Path
    config: StudyConfig
    log: TrialLog
    contents: LogContents
    changes: tuple[str, ...] = ()

    @classmethod
    def create_or_resume(
        cls, config: StudyConfig, identity: Identity, *, fingerprint: Mapping[str, Any], command: Sequence[str]
    ) -> RunFolder:
        """Open or create the folder that ``config`` names; resume the study that is in it.

        Args:
            config: ``out`` is the folder itself, else it is ``runs/<study>`` here; without either it is a new one.
            identity: what the study is of; another one is refused.
            fingerprint: of the evaluator's session, plain values.
            command: the command line, for the manifest.

        Raises:
            RunFolderError: it cannot be written, is in use, is no run folder, or holds another study.
        """
        path, study = _place(config)
        fixed = _fixed(config, identity)
        with disk_errors(path):
            _refuse_foreign(path)
            _check(path, config.study, fixed)  # before opening the log, which may be another study's
            log, contents = TrialLog.open(path / LOG)
            try:
                manifest = _check(path, config.study, fixed)  # again, now that nobody else writes
                for file in path.iterdir():
                    if is_temporary(file.name):  # left by a killed write; nobody else has the log's lock
                        file.unlink(missing_ok=True)
                config = config.model_copy(update={"study": manifest["study"] if manifest else study})
                session = {"command": list(command), "folder": _here(), "budget": config.budget, **provenance()}
                session["fingerprint"] = parsed_json(json.dumps(fingerprint, default=str))
                changes = _changes(manifest["fingerprint"], session["fingerprint"]) if manifest else ()
                if manifest and manifest.pop("remade", False):
                    aside = _put_aside(path / MANIFEST)
                    manifest["fingerprint"] = session["fingerprint"]
                    changes = (f"{MANIFEST} was damaged; it is kept as {aside} and written again",)
                _write(path, config, fixed, session, manifest)
            except BaseException:
                log.close()
                raise
        return cls(path, config, log, contents, changes)

    @staticmethod
    def check(config: StudyConfig, identity: Identity) -> None:
        """Check that a study can be begun or resumed in the folder that ``config`` names; write nothing.

        Raises:
            RunFolderError: it cannot be written, is no run folder, or holds another study.
        """
        named = config.out is not None or config.study is not None
        path = config.out or Path("runs", config.study or "")
        with disk_errors(path, _WRITABLE):
            there = next(p for p in (path, *path.parents) if p.exists() or p.is_symlink())
            if not there.is_dir():
                raise RunFolderError(f"{there}: not a folder", _WRITABLE)
            if not os.access(there, os.W_OK | os.X_OK):
                raise RunFolderError(f"{there}: permission denied", _WRITABLE)
            if named and there == path:
                _refuse_foreign(path)
                _check(path, config.study, _fixed(config, identity))

    @property
    def study(self) -> str:
        """The name of the study."""
        return str(self.config.study)

    @property
    def resumed(self) -> bool:
        """Whether there were records when the folder was opened."""
        return bool(self.contents.records)

    @property
    def resume_command(self) -> str:
        """The command, quoted for a shell, that resumes this study."""
        return _resume_command(self.config)

    def close(self) -> None:
        """Close the log, so that another process may go on."""
        self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        unused = not self.resumed and self.log.empty
        self.close()
        if unused and kind is not None and issubclass(kind, OptimizeError):
            self._remove()

    def _remove(self) -> None:
        """Remove the folder of a study that could not start; the runtime's log stays, since the error may name it."""
        with suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {MANIFEST, CONFIG, LOG, RUNTIME_LOG}:
                for name in (MANIFEST, CONFIG, LOG):
                    (self.path / name).unlink(missing_ok=True)
                log = self.path / RUNTIME_LOG
                if log.exists() and not log.stat().st_size:
                    log.unlink()
                self.path.rmdir()


class DamagedManifestError(RunFolderError):
    """A manifest cannot be read; its content may be found elsewhere."""


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of the run folder ``path``, or None if there is none.

    Raises:
        RunFolderError: it is damaged, written by a newer version, or not ours.
    """
    file = path / MANIFEST
    with disk_errors(file):
        if not file.exists():
            return None
        if not file.is_file() or file.stat().st_size > _MAX_MANIFEST_NBYTES:
            raise RunFolderError(f"{file}: not a manifest of this program", "give another --study or --out")
        content = read_bounded(file, _MAX_MANIFEST_NBYTES)
    try:
        manifest = parsed_json(content)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DamagedManifestError(
            f"{file}: damaged: {why}", "run the search again, which repairs it if it can; nothing here was changed"
        ) from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RunFolderError(
            f"{file}: schema_version is {version}, and this version reads up to {SCHEMA_VERSION}",
            "update the program, or give another --study",
        )
    parts = {"study": str, "fixed": dict, "fingerprint": dict, "resumed": list}
    if type(version) is not int or any(not isinstance(manifest.get(name), kind) for name, kind in parts.items()):
        raise DamagedManifestError(f"{file}: not a manifest of this program", "give another --study or --out")
    return dict(manifest)


def _place(config: StudyConfig) -> tuple[Path, str]:
    """Return the folder, created if necessary, and the name of the study if it is a new one."""
    now = datetime.now(UTC)
    # Names of built-in models may hold a point and a slash: mobilenet_v1@0.5/192.
    zoo = is_name(config.model) and not config.model.endswith(".tflite")
    called = config.model if zoo else Path(config.model).stem
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", called).lstrip("._-")[:60] or "model"
    name = f"{stem}-{now:%Y%m%d-%H%M%S}"
    if config.out is not None or config.study is not None:
        path = config.out or Path("runs", str(config.study))
        _make(path)
        return path, config.study or name
    names = (name if i == 1 else f"{name}-{i}" for i in count(1))  # of another study of this second
    study = next(each for each in names if not Path("runs", each).is_dir())
    path = Path("runs", study)
    _make(path)
    return path, study


def kept_budget(out: str | None, study: str | None) -> int | None:
    """Return the budget of the study in the folder that is asked for; None where there is none."""
    path = Path(out) if out is not None else Path("runs", study) if study is not None else None
    if path is None or not ((path / CONFIG).is_file() and (path / MANIFEST).is_file()):
        return None
    try:
        budget = read_settings(path / CONFIG).get("budget")
    except OptimizeError:
        return None
    known = isinstance(budget, int) and not isinstance(budget, bool) and 0 < budget <= _MOST_KEPT
    return budget if known else None


def _fixed(config: StudyConfig, identity: Identity) -> dict[str, Any]:
    """Return what is constant within a study."""
    settings = config.model_dump(mode="json") | {"objective": ",".join(config.objective)}
    return {"rate": settings["rate"], **identity.to_json(), **{name: settings[name] for name in _FIXED}}


def _make(path: Path) -> None:
    with disk_errors(path, _WRITABLE):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            wrong = next(p for p in (path, *path.parents) if p.exists() or p.is_symlink())
            raise RunFolderError(f"{wrong}: not a folder", _WRITABLE) from None


def _refuse_foreign(path: Path) -> None:
    """Raise where the folder holds files of another program; a study that was killed while it began is ours."""
    names = {p.name for p in path.iterdir()}
    if MANIFEST in names:
        return
    log = path / LOG
    strangers = sorted(n for n in names - {LOG, CONFIG, RUNTIME_LOG} if not is_temporary(n))
    if LOG in names and not (
        log.is_file() and log.stat().st_size <= len(header()) and header().startswith(log.read_bytes())
    ):
        strangers.append(LOG)
    if strangers:
        raise RunFolderError(
            f"{path}: holds {strangers[0]!r} but no {MANIFEST}: not a run folder", "give another --out"
        )


def _check(path: Path, study: str | None, fixed: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the manifest if there is one; raise where it belongs to another study.

    A damaged one is rebuilt from the settings and the log.
    """
    try:
        manifest = read_manifest(path)
    except DamagedManifestError:
        manifest = _remade_manifest(path, fixed)
        if manifest is None:
            raise
    if manifest is None:
        return None
    there = {"study": manifest["study"], **manifest["fixed"]}
    if isinstance(there.get("objective"), list):  # from the settings that rebuilt the manifest
        there["objective"] = ",".join(map(str, there["objective"]))
    here = {"study": study or manifest["study"], **fixed}
    for name, value in here.items():
        if name == "processors" and None in (value, there.get(name)) and not manifest.get("remade"):
            continue  # named by one of them alone: what they were or are is in measured_on
        if there.get(name) != value:
            raise RunFolderError(
                f"{path} holds another study: {_difference(name, there.get(name), value)}",
                "give another --study or --out",
            )
    return manifest


def _write(
    path: Path, config: StudyConfig, fixed: Mapping[str, Any], session: dict[str, Any], manifest: dict[str, Any] | None
) -> None:
    """Write the settings, then the manifest: a folder with a manifest is complete."""
    import yaml

    settings = {"schema_version": SCHEMA_VERSION, **config.model_dump(mode="json")}
    write_atomic(path / CONFIG, yaml.safe_dump(settings, sort_keys=False).encode())
    if manifest is None:
        head = {"schema_version": SCHEMA_VERSION, "study": config.study, "seed": config.seed, "fixed": fixed}
        manifest = {**head, **session, "resumed": []}
    else:
        manifest["resumed"].append(session)
    write_json(path / MANIFEST, manifest)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"since the study began, {name} changed from {_shown(before.get(name))} to {_shown(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    )


def _remade_manifest(path: Path, fixed: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a manifest rebuilt from the settings and the log of a run folder; None where they hold too little.

    The settings must be readable, and the log must hold a plan of the requested model; the rest is taken from the
    request.

    Raises:
        RunFolderError: they are those of another study.
    """
    try:
        settings, records = read_settings(path / CONFIG), read_log(path / LOG).records
    except (UsageError, RunFolderError):
        return None
    plans = (record.data.get("plan") for record in records if record.kind in {"trial", "baseline"})
    plan = next((p for p in plans if isinstance(p, Mapping)), None)
    if plan is None or not isinstance(settings.get("study"), str):
        return None
    if plan.get("graph_digest") != fixed["model_digest"]:
        raise RunFolderError(f"{path} holds another study: it is of another model", "give another --study or --out")
    return {
        "schema_version": SCHEMA_VERSION,
        "study": settings["study"],
        "seed": settings.get("seed"),
        "fixed": {name: settings.get(name, value) for name, value in fixed.items()},
        "fingerprint": {},
        "resumed": [],
        "remade": True,
    }


def _put_aside(file: Path) -> Path:
    """Give a damaged file another name, and return that."""
    others = (file.with_name(f"{file.name}.damaged-{number}") for number in count(1))
    return file.rename(next(other for other in others if not other.exists()))


def _difference(name: str, there: Any, here: Any) -> str:
    """Return the difference between an existing study's setting and the requested one, in words."""
    if name == "model_digest":
        return "it is of another model"
    if name == "inputs_digest":
        begun = f"it was begun with{'' if there else 'out'} --input"
        return "the file of its --input had other content" if there and here else begun
    if name == "measured_on":
        before, now = (
            [str(each).split(" (", maxsplit=1)[0] for each in names] if isinstance(names, Sequence) else []
            for names in (there, here)
        )
        if before == now:
            return f"its processors {', '.join(before)} differ from those of the same names here"
        again = f" (--processors {','.join(before)} resumes it)" if set(before) < set(now) else ""
        return f"its processors are {', '.join(before) or 'unknown'}; this one has {', '.join(now)}{again}"
    if name == "study":
        return f"it is called {_shown(there)}, not {_shown(here)}"
    option = f"--{name.replace('_', '-')}"
    begun = f"without {option}" if there in (None, []) else f"with {option} {_value(there)}"
    return f"it was begun {begun}; this one has {f'no {option}' if here in (None, []) else f'{option} {_value(here)}'}"


def _shown(value: object) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _value(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return _shown(text)[1:-1]


def _here() -> str | None:
    """Return the current folder; None where it was removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return None


def read_config(run: Path) -> dict[str, Any]:
    """Return the settings of a study, with the paths of its model, platform and inputs from :func:`found_from`.

    Raises:
        UsageError: they are missing or damaged.
        RunFolderError: the manifest is damaged.
    """
    settings, manifest = read_settings(run / CONFIG), read_manifest(run) or {}
    for name in settings.keys() & {"model", "platform", "input"}:
        value = settings[name]
        several = isinstance(value, list)
        settings[name] = [found_from(manifest, text) for text in value] if several else found_from(manifest, value)
    return settings


def found_from(manifest: Mapping[str, Any], text: Any) -> Any:
    """Return the path of a file that a study named as ``FILE`` or ``NAME=FILE``; what is no such file as it is.

    A relative path refers to the folder in which the study ran last, if the file is there, else to the current folder.
    """
    last = [manifest, *manifest.get("resumed", ())][-1]
    folder = last.get("folder") if isinstance(last, Mapping) else None
    if isinstance(folder, str) and folder != _here() and isinstance(text, str) and Path(text).suffix:
        with suppress(OSError, ValueError):  # another person's folder
            for start in (0, text.find("=") + 1):
                if (path := Path(folder, text[start:])).is_file():
                    return f"{text[:start]}{path}"
    return text


def resume_hint(run: Path) -> str:
    """Return how to resume the study of a run folder, as the command of its settings where they can be read."""
    from optimizer.study.config import StudyConfig, parse_config

    with suppress(OptimizeError):
        settings = read_settings(run / CONFIG)
        known = {name: value for name, value in settings.items() if name in StudyConfig.model_fields}
        return f"resume it with: {_resume_command(parse_config(known | {'out': str(run)}))}"
    return f"resume it with --out {run}"


def _resume_command(config: StudyConfig) -> str:
    from optimizer.study.config import command_line

    placed = config.out is not None and config.storage is None  # the folder has the name of its study
    return command_line(config.model_copy(update={"study": None}) if placed else config)
