"""The scoring service's state as plain containers, and back."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vlmrb.scoring.audit import Audit
    from vlmrb.scoring.bisection import Bisection
    from vlmrb.scoring.budget import Budget
    from vlmrb.scoring.service import ScoringService
    from vlmrb.scoring.throttle import Throttle

logger = logging.getLogger(__name__)

SCHEMA = 1
LOAD_CLIPS = 256  # clips taken back in one go, which bounds the memory that their snapshots take


def service_state(service: ScoringService) -> dict[str, Any]:
    """Returns what a resumed run needs, in tensors and plain types; clips in flight are saved as waiting."""
    contents = [content for batch, _ in service._in_flight.values() for content in batch]
    contents += service.queue.waiting.values()
    rows = [
        (clip_id, completed, content.attempts)
        for content in contents
        for clip_id, completed in zip(content.clip_ids, content.completed, strict=True)
    ]
    policy, control = service.queue.policy, service.control
    return {
        "schema": SCHEMA,
        "scorer": service._identity,
        "waiting": torch.tensor(rows, dtype=torch.int64).reshape(-1, 3),  # clip id, completed at, attempts
        "audited": [clip_id for content in contents for clip_id in content.audited],
        "guesses": [content.guess for content in contents for _ in content.clip_ids],
        "evidence": [content.evidence for content in contents for _ in content.clip_ids],
        "meter": service.meter.state_dict(),
        "policy": {"name": policy.name, "state": policy.state_dict()},
        "control": None if control is None else {"name": control.name, "state": control.state_dict()},
        "cache": None if service.cache is None else service.cache.state_dict(),
        "student": None if service.desk is None else service.desk.state_dict(),
        **{name: None if part is None else part.state_dict() for name, part in _optional(service).items()},
    }


def _optional(service: ScoringService) -> dict[str, Budget | Audit | Throttle | Bisection | None]:
    return {
        "budget": service.budget,
        "audit": service.audit,
        "throttle": service.throttle,
        "bisection": service.bisection,
    }


def load_service_state(service: ScoringService, state: Mapping[str, Any]) -> None:
    """Takes up where ``state`` was saved; see `ScoringService.load_state_dict`.

    Raises:
        ValueError: the state is of another schema, policy or control; nothing is changed then.
    """
    if state["schema"] != SCHEMA:
        raise ValueError(f"scoring state of schema {state['schema']}, this version reads {SCHEMA}")
    for what, part in (("policy", service.queue.policy), ("control", service.control)):
        saved, name = state[what] and state[what]["name"], part and part.name
        if saved != name:
            raise ValueError(f"scoring state was saved with scoring.{what} {saved}, not {name}")
    saved = state.get("scorer", service._identity)  # absent from states saved before scorers were noted
    if saved != service._identity:
        logger.warning(
            "scorer %r %r goes on where %r %r left off: the buffer holds scores of both until it is overwritten",
            *(*service._identity, *saved),
        )
    service.queue.policy.load_state_dict(state["policy"]["state"])
    if service.control is not None:
        service.control.load_state_dict(state["control"]["state"])
    service.meter.load_state_dict(state["meter"])
    if service.cache is not None and state["cache"] is not None:
        service.cache.load_state_dict(state["cache"])
    for optional, keeper in _optional(service).items():  # what was not set then begins anew
        if keeper is not None and state.get(optional) is not None:
            keeper.load_state_dict(state[optional])
    audited = set(state.get("audited", ()))
    waiting = state["waiting"].tolist()
    guesses = state.get("guesses", [math.nan] * len(waiting))  # absent from states of earlier versions; so is the next
    evidence = state.get("evidence", [False] * len(waiting))
    rows = [(*row, guess, known) for row, guess, known in zip(waiting, guesses, evidence, strict=True)]
    if (student := state.get("student")) is not None:
        if service.desk is not None:
            service.desk.load_state_dict(student, service.reception.look)
        else:  # nobody goes on for it: what it has not looked at is the scorer's now, what it has settled is given up
            rows += [(clip_id, completed, 0, math.nan, False) for clip_id, completed, _ in student["waiting"]]
            audited |= {clip_id for clip_id, _, drawn in student["waiting"] if drawn}
            service.meter.counts.dropped += student["sent"]["guessed"] + student["sent"]["passed"]
    for start in range(0, len(rows), LOAD_CLIPS):
        batch = rows[start : start + LOAD_CLIPS]
        alive = [row for row in batch if service._clips.contains(row[0])]
        service.meter.counts.stale += len(batch) - len(alive)
        looks = service.reception.look([row[0] for row in alive])
        for (key, described), (clip_id, completed, attempts, guess, known) in zip(looks, alive, strict=True):
            service.queue.add(key, clip_id, completed, attempts, described, clip_id in audited, guess, known)
