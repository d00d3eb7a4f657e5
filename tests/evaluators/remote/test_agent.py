"""How an agent ends while clients wait for answers, and what it does with what a killed one left."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from evaluators.remote.agent import Agent
from evaluators.testing import SyntheticEvaluator
from search_spaces.core.errors import UnavailableError


def interrupted(_: Any) -> Any:
    raise KeyboardInterrupt


def test_whoever_waits_for_an_agent_that_is_ended_gets_an_answer(tmp_path: Path) -> None:
    agent = Agent("a", SyntheticEvaluator(), tmp_path)
    agent.methods["Run"] = interrupted
    running, queued = agent.submit("Run", {}), agent.submit("Run", {})
    with pytest.raises(KeyboardInterrupt):
        agent.serve()
    late: Future[Any] = agent.submit("Run", {})
    with pytest.raises(UnavailableError, match="ended"):
        running.result(1.0)
    assert queued.cancelled()
    assert late.cancelled()


def test_a_study_removes_what_a_killed_agent_left(tmp_path: Path) -> None:
    left = tmp_path / "scratch" / "study-left"
    left.mkdir(parents=True)
    agent = Agent("a", SyntheticEvaluator(), tmp_path)
    platform = SyntheticEvaluator().platform()
    held = agent._prepared("client", platform)
    assert not left.exists()
    held.stack.close()
