"""Storages that refuse access, and URLs that are wrong."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import OperationalError

from optimizer.shared.storage import check_url, patiently
from search_spaces.core.errors import UnavailableError, UsageError
from tests.support.sentences import fails


@pytest.mark.parametrize(
    "said",
    ['FATAL: password authentication failed for user "n2"', 'FATAL: database "nodb" does not exist'],
    ids=["password", "database"],
)
def test_a_refusal_is_told_at_once(said: str) -> None:
    calls = []

    def call() -> None:
        calls.append(said)
        raise OperationalError("SELECT 1", {}, Exception(said)) from Exception(said)

    with fails(UnavailableError):
        patiently(call, "storage postgresql://n2@host/n2", 60.0)
    assert len(calls) == 1


def test_who_does_not_answer_is_waited_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.shared.storage.time.sleep", lambda _: None)
    calls = []

    def call() -> str:
        calls.append(1)
        if len(calls) < 8:
            raise ConnectionError("refused")
        return "there"

    assert patiently(call, "it", 60.0) == "there"
    assert len(caplog.records) == 1
    calls.clear()
    with fails(UnavailableError):
        patiently(call, "it", -1.0)


@pytest.mark.parametrize(
    "url",
    ["postgres://n2:secret@127.0.0.1:5499/n2", "postgres://host/db?password=secret", "postgresql:n2:secret@host/db"],
    ids=["user", "query", "opaque"],
)
def test_a_password_in_a_wrong_url_is_not_shown(url: str) -> None:
    with fails(UsageError):
        check_url(url)
