"""What scorers say about themselves, from where they run to the service's statistics."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from odd_scorers import GoodScorer, ReportingScorer
from replay_tools import Episodes, make_buffer

from vlmrb.scoring.backends import MAX_NAME, MAX_REPORTED, report
from vlmrb.scoring.service import ScoringService

BACKENDS = ["sync", "thread", "process"]


def run(scorer: GoodScorer, backend: str, clips: int = 40, **settings: Any) -> ScoringService:
    buffer, episodes = make_buffer(), Episodes()
    service = ScoringService(buffer, scorer, backend=backend, batch_clips=8, **settings)
    episodes.clips(buffer, clips)
    assert service.drain(60)
    service.close()
    assert service.stats()["scored"] == buffer.clips.emitted
    return service


def reported(service: ScoringService) -> dict[str, float]:
    return {name: value for name, value in service.stats().items() if name.startswith("scorer_")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_latest_report_is_among_the_statistics(backend: str):
    service = run(ReportingScorer({"mass": 0.75, "size": np.float32(2)}), backend)
    clips = service.stats()["scored"]
    assert reported(service) == {"scorer_mass": 0.75, "scorer_size": 2.0, "scorer_clips": clips}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_finite_number_is_left_out_with_one_warning(backend: str, caplog: pytest.LogCaptureFixture):
    odd = {"mass": 0.5, "nan": float("nan"), "inf": float("inf"), "text": "0.5", "none": None, "list": [1.0, 2.0]}
    service = run(ReportingScorer(odd), backend)
    assert reported(service).keys() == {"scorer_mass", "scorer_clips"}
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "scorer 'reporting': stats() must give finite numbers" in warnings[0]
    assert warnings[0].endswith("nan, inf, text, none, list")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stats", [RuntimeError("no numbers today"), None, [0.5]])
def test_a_report_that_fails_costs_no_score(backend: str, stats: Any, caplog: pytest.LogCaptureFixture):
    service = run(ReportingScorer(stats), backend)
    assert reported(service) == {}
    assert service.stats()["failures"] == 0
    why = "stats() raised RuntimeError: no numbers today" if isinstance(stats, Exception) else "stats() returned a "
    assert caplog.text.count(why) == 1


def test_a_scorer_without_a_report_shows_nothing_and_warns_of_nothing(caplog: pytest.LogCaptureFixture):
    assert reported(run(GoodScorer(), "process")) == {}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_numbers_of_numpy_and_torch_become_plain_ones():
    found = report(ReportingScorer({"a": np.float64(1), "b": torch.tensor(2.0), "c": np.array(3), "d": True}))
    assert {name: (value, type(value)) for name, value in found.items()} == {
        "a": (1.0, float),
        "b": (2.0, float),
        "c": (3.0, float),
        "d": (1.0, float),
        "clips": (0.0, float),
    }


def test_reports_are_bounded_so_that_messages_stay_small():
    found = report(ReportingScorer({f"{number:04}" + "x" * 1000: 1.0 for number in range(5000)}))
    assert len(found) == MAX_REPORTED
    assert {len(name) for name in found} == {MAX_NAME}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_time_that_the_scorer_is_at_work_is_measured_where_it_works(backend: str):
    scorer = ReportingScorer({}, seconds=0.05)
    meter = run(scorer, backend).meter
    assert meter.asked >= 40
    assert meter.batches >= meter.asked / 8
    assert 0.05 * meter.batches <= meter.busy_s < 0.15 * meter.batches
