"""The answer of a study in sentences and tables, which the terminal and the report show.

A result here is the document of ``--json``, with the keys of latencies for any objective (:func:`as_latencies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from evaluators.measurement.final import Ratio
from evaluators.objectives import LATENCY, Objective, find_objective
from evaluators.workload.objectives import find_workload_objective
from optimizer.report.document import Cell, Column, Table, headed, shown
from search_spaces.core.errors import UsageError
from search_spaces.core.plan import Plan, Stage, runs_of
from search_spaces.core.wording import human_bytes, percent, plural

if TYPE_CHECKING:
    from evaluators.samples import Samples
    from search_spaces.core.graph import Graph
    from search_spaces.core.joined_graph import JoinedGraph

HOSTED = frozenset({"litert", "tflite-runtime", "cuda"})
"""Evaluators that measure the machine that they run on."""

UNDECIDED = "not decided"
_VAGUE_RATIO = 0.25  # an interval wider than this, and than the difference, tells only that there is one
_TIMES = 2.0  # larger ratios are shown as factors, not in per cent
_TELLING = 25.0  # per cent: a wider interval decides nothing
_TIE = 1.0  # per cent: plans that differ by no more, and not significantly, are called equal
_UNKNOWN = 100.0  # intervals of predictions that reach so many times the value say nothing
_NOISE = 0.01  # smaller relative differences are noise of the machine
_MOST_RUNS = 4  # of consecutive operators of a stage, that are named
_AT_BOUND = 1e-3  # relative: a plan that is nearer to a bound reaches it
_FIGURES = {
    "mean, ms": "mean_ms",
    "worst, ms": "worst_ms",
    "longest, ms": "longest_ms",
    "makespan, ms": "makespan_ms",
    "requests a second": "throughput_per_s",
    "missed": "misses",
    "turned away": "rejected",
}
_SELDOM = {"longest_ms": "worst_ms", "misses": "", "rejected": ""}  # shown if a value differs from this key's, or 0
ORDERS = {
    "fifo": "first come, first served",
    "priority": "by priority, then the oldest request first",
    "edf": "the earliest deadline first",
    "static": "in a fixed order",
}


def as_latencies(result: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys of another objective's numbers to those of latencies; ``objective`` tells their unit."""
    objective = objective_of(result)
    if objective == LATENCY:
        return result
    for entry in filter(None, (result["best"], *result["baselines"].values())):
        entry["latency_ms"] = entry.pop(objective.key, None)
        entry.setdefault("stage_ms", entry.get(f"stage_{objective.shown_unit.lower()}"))
    result.setdefault("model_bound_ms", result.get(f"model_bound_{objective.shown_unit.lower()}"))
    return result


def objective_of(result: Mapping[str, Any]) -> Objective:
    """Return the first objective of a result, which its numbers are of."""
    name = str(result.get("objective", "latency"))
    with suppress(UsageError):
        return find_workload_objective(name) if "workload" in result else find_objective(name)
    return LATENCY


def answer_text(result: Mapping[str, Any]) -> str:
    """Return in a few words which plan to use."""
    speedup, name = result["speedup"], called(result, result["best"]["plan"], result["best"].get("number"))
    predicted = ", predicted" if result.get("predicted") else ""
    if front := result.get("front"):
        each = [objective_of({**result, "objective": name}) for name in front["objectives"]]
        knee = next(plan for plan in front["plans"] if plan["knee"])
        values = ", ".join(f"{o.name} {shown(knee['values'][o.value_key], '.4g')} {o.shown_unit}" for o in each)
        what = "the knee of the front, the best compromise" if len(front["plans"]) > 1 else "the only plan of the front"
        return f"{name}: {what}{predicted}: {values}"
    if speedup is None or speedup["plan"] == result["best"]["plan"]:
        return name + predicted
    sure = Ratio(speedup["ratio"], *speedup["ci95"]).significant
    better = no_better(objective_of(result).better, sure=sure, all_tried=bool(result["space"]["exhausted"]))
    if result.get("decided") is False:
        better = f"not decided whether another plan is {objective_of(result).better}"
    return f"“{speedup['baseline']}”: {better}{predicted}"


def called(result: Mapping[str, Any], plan: Mapping[str, Any], number: int | None = None) -> str:
    """Return the name of a plan, or what it is; ``number`` is that of the table's rows."""
    named = (name for name, entry in result["baselines"].items() if entry["plan"] == plan)
    if name := next(named, ""):
        return f"“{name}”"
    processors = ", ".join(dict.fromkeys(stage["processor"] for stage in plan["stages"]))
    what = f"{plural(len(plan['stages']), 'stage')} on {processors}"
    return f"a plan of {what}" if number is None else f"plan {number} ({what})"


def gain_text(result: Mapping[str, Any]) -> str:
    """Return what the recommended plan gains against the best one-stage plan and the best cut criterion."""
    if result.get("front"):
        return _front_gain(result)
    speedup, objective, best = result["speedup"], objective_of(result), result["best"]["plan"]
    if speedup is None:
        if result["unique_plans"] > 1:
            return "no other plan that was tried is feasible"
        return f"no other plan {'is in the space' if result['space']['exhausted'] else 'was tried'}"
    name, ratio, gains = speedup["baseline"], Ratio(speedup["ratio"], *speedup["ci95"]), speedup["plan"] == best
    outcomes = result.get("workload", {}).get("outcomes", {})
    if not objective.scales and "best" in outcomes:
        missed = missed_text(outcomes, name if gains else "", sure=ratio.significant)
        return missed if gains else f"none: {missed}"
    stages = len(speedup["plan"]["stages"])
    if gains:
        one = len(result["baselines"].get(name, speedup)["plan"]["stages"]) == 1
        than = f"“{name}”, the best {'one-stage plan' if one else 'baseline'}"
        if objective.is_time:
            low_high = "" if ratio.low == ratio.high else f" (95 %: {ratio.low:.3f} to {ratio.high:.3f})"
            text = f"{ratio.value:.3f} times as fast as {than}{low_high}"
        else:
            text = slower_than(ratio.inverse, objective, than)
        text += "" if ratio.significant else "; not significant"
    else:
        other = f"the next best plan, {called(result, speedup['plan'], speedup.get('number'))}"
        slower = slower_than(ratio.inverse, objective)
        text = f"none: {other}, is {slower}" if objective.is_time else f"none: {other}: {slower}"
        if slower == UNDECIDED:
            why = ": predictions may be too far off to tell" if speedup["predicted"] else ""
            text = f"not decided against {other}{why}"
        elif not (ratio.significant or slower.startswith("equal")):
            simpler = ratio.value > 1.0 and len(best["stages"]) < stages
            text += f"; not significant{', so the plan of fewer stages is recommended' if simpler else ''}"
    criterion = (result.get("final") or {}).get("criterion")
    others = (called(result, plan) for plan in (best, speedup["plan"]))
    if criterion is not None and f"“{criterion['name']}”" not in others:
        slower = slower_than(Ratio(criterion["slower"], *criterion["ci95"]), objective)
        text += f"; best cut criterion, “{criterion['name']}”: {slower}"
    return text


def _front_gain(result: Mapping[str, Any]) -> str:
    """Return what the knee of a front gains and gives up against the best plan by one objective."""
    front = result["front"]
    objectives = [objective_of({**result, "objective": name}) for name in front["objectives"]]
    knee = next(plan for plan in front["plans"] if plan["knee"])
    for objective in objectives:
        other = min(front["plans"], key=lambda plan: float(plan["values"][objective.value_key]))
        if other is not knee:
            changes = []
            for o in objectives:
                more = knee["values"][o.value_key] / (other["values"][o.value_key] or 1.0) - 1.0
                figure = percent(abs(more), 1) if abs(more) < _TIMES - 1.0 else f"{more + 1.0:.3g} times"
                how = f"{figure} {'higher' if more > 0 else 'lower'}" if figure.endswith("%") else f"{figure} as high"
                how = "equal" if figure == percent(0.0, 1) else how
                changes.append(f"{o.title.partition(',')[0]} {how}")
            against = f"{called(result, other['plan'])}, the plan of the front with the best {objective.name}"
            return f"{', '.join(changes)}, compared with {against}"
    return "no other plan that was tried is significantly better by any objective"


def bound_text(result: Mapping[str, Any]) -> str:
    """Return how far the best plan can be from the best possible one, by the model; "" where that is unknown."""
    bound, gap, more = result["model_bound_ms"], result["gap"], result.get("bounds") or {}
    if bound == 0.0:  # of values that follow from a plan or its runs none is looked for
        return "none was found in the time for it" if objective_of(result).is_additive else ""
    if bound is None or gap is None:
        return ""
    objective = objective_of(result)
    own, times = more.get("model") == "the evaluator's own", "predicted" if result.get("predicted") else "profiled"
    whose = "this cost model" if own else f"the operators' {times} times"
    least = f"{shown(bound, '.4g')} {objective.shown_unit}"
    if gap < -_NOISE:
        wrong = percent(-gap / (1.0 + gap), 1)
        text = (
            f"none: {whose} predict{'s' if whose.startswith('this') else ''} at least {least} for every plan of this "
        )
        text += f"space, {wrong} more than was found"
    else:
        exact = more.get("proven") is not False and gap > -_AT_BOUND
        reached = "reaches it" if exact else f"reaches it, within {percent(max(_AT_BOUND, -gap), 1)}"
        far = f"takes {gap + 1.0:.3g} times as {'long' if objective.is_time else 'much'}"
        how = far if gap >= _TIMES - 1.0 else f"is {percent(gap, 1)} above it" if gap >= _AT_BOUND else reached
        text = f"{bound_name(result)} of this space by {whose}: {least}; the plan {how}"
    if result.get("front"):
        text = f"{objective.name}: {text}"
    if objective.shown_unit == "ms" and gap >= -_NOISE and more.get("all_plans_ms", bound) < bound:
        text += f"; lower bound for any plan: {shown(more['all_plans_ms'], '.4g')} ms"
    return text


def bound_name(result: Mapping[str, Any]) -> str:
    """Return the name of the predicted bound: it is a plan's prediction if the predicted optimum is proven."""
    if objective_of(result).quantile is not None:  # no smaller than the median
        return "predicted lower bound of the median latency"
    return "predicted lower bound" if (result.get("bounds") or {}).get("proven") is False else "predicted optimum"


def front_table(result: Mapping[str, Any]) -> Table:
    """Return the plans that none beats in all objectives, by the first objective."""
    front, rows = result["front"], []
    objectives = [objective_of({**result, "objective": name}) for name in front["objectives"]]
    for each in front["plans"]:
        values = [each["values"][o.value_key] for o in objectives]
        stages = each["plan"]["stages"]
        placed = ", ".join(stage["processor"] for stage in stages)
        rows.append((*values, len(stages), each["name"] or placed, "knee" if each["knee"] else ""))
    source = "predicted " if result.get("predicted") else ""
    columns = headed(
        *(Column(f"{source}{o.title}, {o.shown_unit}", ".4g") for o in objectives), "stages|d; plan; remark"
    )
    runs = "" if source or len(rows) == 1 else ", each objective by runs of its own"
    title = f"Front: {plural(len(rows), 'plan')} that no other plan beats significantly{runs}"
    return Table(title, columns, tuple(rows))


def model_of(
    stage: Stage, graph: Graph | None, joined: JoinedGraph | None
) -> tuple[str, Graph | None, tuple[int, ...]]:
    """Return the model that a stage is of: its name among several, its graph, and the operators' numbers in it."""
    if joined is None:
        return "", graph, stage.operators
    component = joined.components[joined.component_of[stage.operators[0]]]
    return component.name, component.graph, component.own(stage.operators)


def stages_table(
    result: Mapping[str, Any],
    caption: str,
    of: Callable[[Stage], tuple[str, Graph | None, tuple[int, ...]]],
    begins_s: Mapping[int, float] | None = None,
) -> Table:
    """Return the best plan, stage by stage.

    Args:
        of: returns what :func:`model_of` does.
        begins_s: stage → when it began in one run.
    """
    entry, rows, begins_s = result["best"], [], begins_s or {}
    plan = Plan.from_json(entry["plan"])
    means_ms = result.get("workload", {}).get("outcomes", {}).get("best", {}).get("instances_ms", {})
    if "workload" in result:
        caption += f": requests are served {ORDERS[plan.dispatch]}"
    times = entry.get("stage_ms") or [None] * len(plan.stages)
    for index, (stage, took_ms) in enumerate(zip(plan.stages, times, strict=True)):
        model, graph, operators = of(stage)
        what = describe_operators(graph, operators) if graph is not None else f"{operators[0]} to {operators[-1]}"
        transferred = crossing(graph, operators) if graph is not None else None
        begin_ms = round(begins_s[index] * 1e3, 3) if index in begins_s else None
        where = stage.processor if stage.share is None else f"{stage.processor} ({stage.share})"
        rows.append((index, took_ms, begin_ms, model, means_ms.get(model), where, what, transferred))
    took = f"{'predicted' if result.get('predicted') else 'measured'}, {objective_of(result).stage_unit}|.4g"
    columns = headed(
        "stage|d", took, "begins at, ms|.4g; model; mean of the model, ms|.4g; processor; operators; transfers"
    )
    return Table(caption, columns, tuple(rows))


def outcomes_table(result: Mapping[str, Any]) -> Table:
    """Return the figures of each baseline of several models, and of the recommended plan where it is none of them."""
    outcomes, objective = result["workload"]["outcomes"], objective_of(result)
    keys = {
        name: key
        for name, key in _FIGURES.items()
        if key not in _SELDOM or any(entry[key] != entry.get(_SELDOM[key], 0.0) for entry in outcomes.values())
    }
    own = objective.name not in {"mean", "worst", "makespan", "misses", "throughput"}
    columns = headed(
        "plan",
        *(Column(name, ".4g") for name in keys),
        *(Column(f"{name}, {objective.shown_unit}", ".4g") for name in (objective.name, "predicted")),
        "remark",
    )
    rows: list[tuple[Cell, ...]] = []
    own_plan = result["best"]["plan"] not in [known["plan"] for known in result["baselines"].values()]
    best = {"best": result["best"]} if own_plan else {}
    for name, known in (best | result["baselines"]).items():
        entry, value = outcomes.get(name), known["latency_ms"]
        figures = [entry[key] if entry else None for key in keys.values()]
        predicted = (entry.get("predicted") or {}).get("objective") if entry and not result.get("predicted") else None
        rows.append(
            (
                "recommended plan" if name == "best" else name,
                *figures,
                value["median"] if own and value else None,
                predicted,
                known["failure"],
            )
        )
    return Table(f"Plans of the models, {'predicted' if result.get('predicted') else 'measured'}", columns, tuple(rows))


def decomposed_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each model that might be decomposed, and how far it is in the best plan."""
    for name, entry in result.get("workload", {}).get("tucker", {}).items():
        allowed = f"{entry['max_error']:g} allowed"
        if entry["ranks"]:
            count = len(entry["ranks"])
            what = f"{count} convolution{'s run' if count > 1 else ' runs'} as Tucker-2 triples"
            known = "off by" if entry["error_measured"] else "expected from its filters to be off by"
            off = "" if entry["error"] is None else f", outputs {known} {entry['error']:.2g}"
            yield name, f"{what}: {entry['macs_saved']:.1%} fewer multiply-accumulates{off} ({allowed})"
        elif not entry["decomposable"]:
            yield name, "as it is, it cannot be decomposed"
        elif entry["variants"]:
            yield name, f"as it is, {entry['variants']} ways to decompose it were searched ({allowed})"
        else:
            yield name, f"as it is, no way to decompose it saves time within its error ({allowed})"


def no_better(better: str, *, sure: bool, all_tried: bool) -> str:
    """Return the answer where no other plan won.

    Args:
        better: the comparative, as ``faster``.
        sure: whether the next best plan is significantly worse.
        all_tried: whether no plan of the space is left.
    """
    if not sure:
        return f"no significantly {better} plan was found"
    return f"no plan is {better}" if all_tried else f"no {better} plan was found"


def missed_text(outcomes: Mapping[str, Any], baseline: str, *, sure: bool) -> str:
    """Return how many requests of the median run miss their deadlines with the recommended plan.

    Args:
        outcomes: of the recommended plan ("best") and of baselines.
        baseline: the best one; "" where it is recommended.
        sure: whether plans differ significantly.
    """
    ours, theirs = outcomes["best"], outcomes.get(baseline)
    text = f"{ours['misses']:.0f} of {ours['requests']:.0f} requests of the median run miss their deadlines"
    if not baseline:
        return f"{text}; no plan with {'' if sure else 'significantly '}fewer was found"
    if theirs is not None:
        text += f", {theirs['misses']:.0f} with “{baseline}”, the best baseline"
        if ours["misses"] == theirs["misses"]:
            text += f"; the mean latency is {ours['mean_ms']:.4g} ms instead of {theirs['mean_ms']:.4g} ms"
    return text if sure else f"{text}; not significant"


def slower_than(ratio: Ratio, objective: Objective, than: str = "") -> str:
    """Return :func:`slower_text` for a sentence: ``4.7 % slower than “whole on cpu” (95 %: 1.7 to 7.9 %)``."""
    figure, bracket, interval = slower_text(ratio, objective).partition(" [")
    if than:
        equal, times = figure.startswith("equal"), "times as" in figure
        word = "against" if figure == UNDECIDED else "to" if equal else "as" if times else "than"
        figure += f" {word} {than}"
    if not bracket:
        return figure
    low, high = interval.removesuffix("]").split(", ")
    unit = " %" if "%" in figure else ""
    return f"{figure} (95 %: {low} to {high}{unit})"


def interval_ms(samples: Samples, unit: str = "ms") -> str:
    """Return ``12.34 ms [12.30, 12.41]``: the median and its 95 % interval, in thousandths of the samples' unit."""
    return figure_text(samples.median, samples.ci95, unit)


def same_plan(name: str) -> str:
    """Return what stands in place of a comparison where a plan has two names."""
    return f"the same plan as “{name}”"


def against_text(ratio: Ratio, objective: Objective, *, racing: bool) -> str:
    """Return how a plan compares with the recommended one; ``racing``: the final compared it to the end."""
    text = slower_text(ratio, objective)
    if not objective.scales:
        return text
    vague = ratio.high - ratio.low > max(_VAGUE_RATIO, ratio.value - 1.0)  # after few rounds
    if vague and not racing and ratio.low >= 1.0 + _NOISE and ratio.value < _TIMES:
        return f"at least {percent(ratio.low - 1.0)} {objective.larger}"
    early = text == UNDECIDED and not racing and ratio.value > 1.0  # after too few rounds for an interval
    return f"about {percent(ratio.value - 1.0)} {objective.larger}" if early else text


def figure_text(value: float, interval: tuple[float, float], unit: str) -> str:
    """Return ``12.34 ms [12.30, 12.41]``, in thousandths of the value's unit; no interval where it has no width."""
    digits = 1 if value >= 0.1 else 2 if value >= 0.01 else 3
    low, high = (f"{end * 1e3:.{digits}f}" for end in interval)
    ends = "not known" if interval[1] > _UNKNOWN * value else f"{low}, {high}"
    return f"{value * 1e3:.{digits}f} {unit}" + ("" if interval[0] == interval[1] else f" [{ends}]")


def slower_text(ratio: Ratio, objective: Objective = LATENCY) -> str:
    """Return how much slower, or faster, a plan is than another, or that they are equal or not decided.

    Faster is of speeds: 10 % faster is 1.1 times as fast. Of other objectives than times, how much more or less energy
    or memory it takes; of those whose ratios mean nothing only which is better.
    """
    if not objective.scales and ratio.significant:
        return "worse" if ratio.value > 1.0 else "better"
    faster = objective.is_time and ratio.value < 1.0
    of, word = ratio.inverse if faster else ratio, objective.larger if ratio.value > 1.0 else objective.smaller
    low, value, high = ((x - 1.0) * 100 for x in (of.low, of.value, of.high))
    if not ratio.significant:
        far = max(-low, high)
        if low == high or far > _TELLING:
            return "equal" if low == high else UNDECIDED
        if abs(value) <= _TIE:
            return f"equal within {_brief(far)} %"
    if low == high:
        return f"{_brief(abs(value))} % {word}"
    if of.low > _TIMES:
        much = "fast" if faster else "long" if objective.is_time else "much"
        return f"{of.value:.3g} times as {much} [{of.low:.3g}, {of.high:.3g}]"
    return (
        f"{_brief(abs(value))} % {word} [{_brief(low if value > 0 else -high)}, {_brief(high if value > 0 else -low)}]"
    )


def _brief(number: float) -> str:
    text = f"{number:.0f}" if abs(number) >= 9.95 else f"{number:.1f}"
    return "0.0" if text == "-0.0" else text.replace("-", "−")


def crossing(graph: Graph, operators: Sequence[int]) -> str | None:
    """Return the bytes that some operators transfer to others; None where there are no others."""
    border = graph.boundary(operators)
    later = [t for t in border.outputs if t not in graph.outputs or graph.consumers.get(t)]
    return human_bytes(sum(graph.tensors[t].nbytes for t in later)) if later else None


def describe_operators(graph: Graph, operators: Sequence[int]) -> str:
    """Return ``0 to 9: 7 CONV_2D, 3 MAX_POOL_2D``; both ends are included."""
    counts = Counter(graph.operators[index].kind for index in operators)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(3)) + (", …" if len(counts) > 3 else "")
    runs = [f"{first} to {last - 1}" if last - first > 1 else f"{first}" for first, last in runs_of(operators)]
    return f"{', '.join(runs[:_MOST_RUNS])}{', …' if len(runs) > _MOST_RUNS else ''}: {kinds}"
