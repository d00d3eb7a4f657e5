"""Several models at once (seed 001): which models, when requests come, and their deadlines.

On the command line a workload is models with counts, ``squeezenet1_1*4,mobilenet_v1``, whose requests all come at once;
a file (:mod:`search_spaces.core.workload_file`) says the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from search_spaces.core.bounded import built
from search_spaces.core.errors import UsageError

ArrivalKind = Literal["burst", "closed", "periodic", "poisson"]
KINDS: tuple[ArrivalKind, ...] = get_args(ArrivalKind)
MAX_INSTANCES, MAX_REQUESTS = 256, 1_000_000
QUEUE = 64
RANKED_ERROR = 0.1
"""Default limit on the relative error of outputs where convolutions may be decomposed."""
GIVEN = ("input", "signature", "custom_ops")
"""Settings of each model: options of the command line, and keys of a workload file."""
_COUNT = re.compile(r"(?P<model>.+?)(?:[×*:]|x)(?P<count>[0-9]+)")
_SIZE = re.compile(r".*/[0-9]+x[0-9]{2,}")
_FILES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Arrival:
    """When the requests of one instance come.

    Attributes:
        kind: ``burst``: all at the beginning; ``closed``: each when the one before is done; ``periodic``: every
            ``period_s``; ``poisson``: at random, ``period_s`` apart on average.
        requests: how many come in one run of the workload.
        period_s: seconds between two requests; 0 where the kind needs none.
        offset_s: seconds until the first one may come.
    """

    kind: ArrivalKind = "burst"
    requests: int = 1
    period_s: float = 0.0
    offset_s: float = 0.0

    @property
    def rated(self) -> bool:
        """Whether requests are periodic or random."""
        return self.kind not in {"burst", "closed"}

    def releases_s(self, seed: int) -> tuple[float, ...]:
        """Return the arrival times in seconds, ascending; of a closed loop only the first one."""
        if self.kind == "closed":
            return (self.offset_s,)
        if self.kind == "burst":
            return (self.offset_s,) * self.requests
        if self.kind == "periodic":
            return tuple(self.offset_s + i * self.period_s for i in range(self.requests))
        import numpy as np

        gaps = np.random.default_rng([seed, self.requests]).exponential(self.period_s, self.requests)
        return tuple(float(t) for t in self.offset_s + np.cumsum(gaps))


@dataclass(frozen=True, slots=True)
class Client:
    """A model and its requests.

    Attributes:
        name: unique in its workload.
        model: name of a built-in model, or path of a ``.tflite`` file.
        count: instances of the model, each with its own requests.
        priority: larger is served sooner, where the dispatch is ``priority``.
        deadline_s: how long after its arrival a request is due; None: no deadline.
        own_weights: whether each instance has its own copy of the weights in memory, instead of sharing one file.
        queue: capacity of an instance's queue; a request that comes when it is full is rejected.
        tucker: largest relative error of its outputs that decomposed convolutions may cause; 0: none; None: not given.
        input: an ``.npy`` or ``.npz`` file with its inputs; None: random inputs.
        signature: key of the signature to run; None: the main subgraph.
        custom_ops: a library with kernels of its custom operators.
    """

    name: str
    model: str
    count: int = 1
    arrival: Arrival = Arrival()
    priority: int = 0
    deadline_s: float | None = None
    own_weights: bool = False
    queue: int = QUEUE
    tucker: float | None = None
    input: str | None = None
    signature: str | None = None
    custom_ops: str | None = None

    @property
    def source(self) -> tuple[str, str | None, str | None, str | None]:
        """All that its network is read from; clients with the same source share weights and files."""
        return self.model, self.input, self.signature, self.custom_ops


@dataclass(frozen=True, slots=True)
class Instance:
    """One of a client's instances: its own name, and the position of its client."""

    name: str
    client: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Clients that share a device.

    Attributes:
        name: for people.
        seed: of random arrivals.
        memory_limit_nbytes: limit on weights and tensors of all instances together; None: no limit.

    Raises:
        UsageError: there is no client, two have one name, or a number is out of range.
    """

    name: str
    clients: tuple[Client, ...]
    seed: int = 0
    memory_limit_nbytes: int | None = None

    def __post_init__(self) -> None:
        if not self.clients:
            raise UsageError(f"workload {self.name!r} has no models")
        for client in self.clients:
            problem = wrong_with(client)
            if problem:
                raise UsageError(f"workload {self.name!r}: {client.name!r} {problem}")
        twice = [name for name, count in Counter(c.name for c in self.clients).items() if count > 1]
        if twice:
            raise UsageError(
                f"workload {self.name!r} has {twice[0]!r} twice", "give one of them a count, or each its own name"
            )
        if sum(c.count for c in self.clients) > MAX_INSTANCES:
            raise UsageError(f"workload {self.name!r} has more than {MAX_INSTANCES} instances")

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, client by client; where a client has several they are numbered from 1."""
        return tuple(
            Instance(client.name if client.count == 1 else f"{client.name} {number}", index)
            for index, client in enumerate(self.clients)
            for number in range(1, client.count + 1)
        )

    def client_of(self, instance: int) -> Client:
        """Return the client of an instance, given by its position."""
        return self.clients[self.instances[instance].client]

    @property
    def deadlines(self) -> bool:
        """Whether some request has a deadline."""
        return any(c.deadline_s is not None for c in self.clients)

    @property
    def timed(self) -> bool:
        """Whether some requests come at moments of their own, so that a run lasts as long on a slower machine."""
        return any(c.arrival.rated or c.arrival.offset_s > 0.0 for c in self.clients)

    def at_rate(self, factor: float) -> Workload:
        """Return the workload with periodic and random requests that come ``factor`` times as often, equally urgent.

        Raises:
            UsageError: no requests come at a rate.
        """
        if not any(client.arrival.rated for client in self.clients):
            raise UsageError("--rate has no effect: no requests are periodic or random", "give another workload")
        clients = []
        for client in self.clients:
            arrival = client.arrival
            scaled = replace(arrival, period_s=arrival.period_s / factor, offset_s=arrival.offset_s / factor)
            clients.append(replace(client, arrival=scaled if arrival.rated else arrival))
        return replace(self, clients=tuple(clients))

    def to_json(self) -> dict[str, Any]:
        """Return the workload as plain values."""
        document = asdict(self)
        for client in document["clients"]:
            for name in ("tucker", *GIVEN):
                if client[name] is None:  # absent, so that digests are as before the field existed
                    del client[name]
        return document

    @classmethod
    def from_json(cls, data: object) -> Workload:
        """Build a workload from what :meth:`to_json` returned; other fields are ignored.

        Raises:
            UsageError: a field is missing, has the wrong type, or an invalid value.
        """
        return built(cls, data, "a workload is", UsageError)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all but its name."""
        content = {name: value for name, value in self.to_json().items() if name != "name"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def wrong_with(client: Client) -> str:
    """Return what is wrong with a client's numbers, as a predicate, or ""."""
    arrival = client.arrival
    checks = (
        (1 <= client.count <= MAX_INSTANCES, f"has the count {client.count}: must be from 1 to {MAX_INSTANCES}"),
        (1 <= arrival.requests <= MAX_REQUESTS, f"has {arrival.requests} requests: must be from 1 to {MAX_REQUESTS}"),
        (not arrival.rated or arrival.period_s > 0.0, "must have a period above 0"),
        (arrival.offset_s >= 0.0, "has an offset below 0"),
        (client.deadline_s is None or client.deadline_s > 0.0, "has a deadline that is not above 0"),
        (client.tucker is None or client.tucker >= 0.0, "has an error below 0 to be decomposed within"),
        (client.queue >= 1, f"has a queue of {client.queue}: must be at least 1"),
        (
            arrival.kind != "burst" or arrival.requests <= client.queue,
            f"has {arrival.requests} requests at once and room for {client.queue} in its queue",
        ),
    )
    return next((text for fine, text in checks if not fine), "")


def is_workload(text: str) -> bool:
    """Return whether a ``--model`` names several models: a workload file, a list, or a count."""
    if text.endswith(".tflite") and "," in text and Path(text).is_file():
        return False
    return names_file(text) or names_several(text)


def names_file(text: str) -> bool:
    """Return whether a text is the name of one YAML file."""
    return text.endswith(_FILES) and (not names_several(text) or Path(text).is_file())


def names_several(text: str) -> bool:
    """Return whether a text is a list, or has a count."""
    return "," in text or counted(text)[1] is not None


def counted(text: str) -> tuple[str, int | None]:
    """Return model and count of ``NAME*4``, also written with ``:``, ``x`` or ``×``; the count may be None.

    ``posenet/240x320`` has a size, and ``posenet/240x4`` is four of one: no image is less than 10 pixels wide.
    """
    match = _COUNT.fullmatch(text)
    if match is None or _SIZE.fullmatch(text):
        return text, None
    return match["model"], int(match["count"])


def workload_of(text: str) -> Workload:
    """Return the workload of ``NAME*4,NAME,…``: one request for each instance, all at once.

    Raises:
        UsageError: a count is 0 or too large, a word is empty, or a model is named twice.
    """
    clients = []
    for word in text.split(","):
        model, count = counted(word.strip())
        if not model:
            raise UsageError(f"--model {text}: a name is missing", "write NAME*4, and commas between several")
        if count == 0:
            raise UsageError(f"--model {word.strip()}: the count must be at least 1", "leave the model out")
        clients.append(Client(model, model, 1 if count is None else count))
    return Workload(text, tuple(clients))


def with_given(clients: Sequence[Client], given: Mapping[str, Sequence[str]]) -> tuple[Client, ...]:
    """Return clients with the settings of the command line, which override those of a workload file.

    Args:
        given: for each of :data:`GIVEN` its texts, as of :func:`by_name`.

    Raises:
        UsageError: a text is for no client, or two are for the same.
    """
    names = [client.name for client in clients]
    found = dict[str, dict[str, Any]]({name: {} for name in names})
    for field in GIVEN:
        for name, value in by_name(f"--{field.replace('_', '-')}", given.get(field) or (), names).items():
            found[name][field] = value
    return tuple(replace(client, **found[client.name]) for client in clients)


def by_name(option: str, texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return model → value of an option: ``NAME=VALUE`` is for one model, ``VALUE`` for all others.

    Raises:
        UsageError: there is no such model, or two values are for the same.
    """
    found = dict[str, str]()
    for text in texts:
        name = max((n for n in names if text.startswith(f"{n}=")), key=len, default="")
        if not name and "=" in text and len(names) > 1 and not Path(text).exists():
            what = f"{option} {text}: there is no model {text.partition('=')[0]!r}"
            raise UsageError(what, f"the models are: {', '.join(sorted(names))}")
        if text == f"{name}=":
            raise UsageError(f"{option} {text}: nothing stands behind '='", f"give {name}=VALUE")
        if name in found:
            whose = name or (names[0] if len(names) == 1 else "every model")
            raise UsageError(
                f"{option} {text}: {whose} has {found[name]} already", "give one, or MODEL=VALUE for one of several"
            )
        found[name] = text[len(name) + 1 :] if name else text
    return {name: found.get(name, found.get("", "")) for name in names if name in found or "" in found}
