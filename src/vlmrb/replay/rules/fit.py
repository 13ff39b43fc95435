"""Confidences from recorded episodes: what a rule's head adds to the return where its body holds.

Returns-to-go are scaled to y in [0, 1]. Rules explain them together, in product logic, by the model
``y ≈ 1 − (1 − b) Π_k (1 − c_k T_k)`` of the whole rules' truths T_k, where ``b = σ(v + Σ_k w_k B_k)`` depends on the
bodies' truths B_k, so that a rule gets no credit for the situation in which it applies: late in a good episode every
transition has a high return. v, w_k and c_k in [0, 1] are fitted by gradient to least cross-entropy.

Before that every rule must pass a support test, by a bootstrap over episodes, since rows of one are not independent:
where its body holds, the mean return must be higher with the head than without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.replay.prefill import read_episode
from vlmrb.replay.rules.schema import RuleSet

_RESAMPLES: Final = 2000
_ALMOST: Final = 1 - 1e-6  # the largest probability that the model gives to anything by itself
_HOLDS: Final = 0.5  # truth from which on a rule counts as seen


@dataclass(frozen=True)
class Evidence:
    """What recorded episodes say about R rules, at N transitions.

    Attributes:
        body: ``float64[N, R]``, truths of the bodies.
        whole: ``float64[N, R]``, truths of the whole rules, never more than the bodies'.
        returns: ``float64[N]``, discounted sums of the rewards from each transition to the end of its episode.
        episode: ``int64[N]``, 0, 1, …
    """

    body: NDArray[np.float64]
    whole: NDArray[np.float64]
    returns: NDArray[np.float64]
    episode: NDArray[np.int64]


@dataclass(frozen=True)
class Finding:
    """What was found about a rule.

    Attributes:
        confidence: the new one.
        status: ``fitted``; ``rejected``: it failed the support test, so its confidence is 0; ``kept``: it was seen too
            rarely to be tested, so its confidence is the one given.
        episodes: in which the whole rule was seen.
        gain: mean return where the whole rule holds, less that where its body holds without the head; NaN if one of the
            two never does.
        p: probability of a gain of at most 0 by the bootstrap; NaN if not tested.
    """

    confidence: float
    status: Literal["fitted", "rejected", "kept"]
    episodes: int
    gain: float
    p: float


def gather_evidence(rules: RuleSet, episodes: Sequence[Path], gamma: float, n_steps: int) -> Evidence:
    """Reads recorded episodes and tells how true the rules are of the rows that a buffer would make of them.

    Args:
        rules: to be judged.
        episodes: files of `vlmrb record`.
        gamma: discount factor per env step.
        n_steps: of the rows: s' is the state that many steps after s, or the episode's last.

    Raises:
        ValueError: a file cannot be read, or is of an environment that the predicates cannot read.
    """
    parts = []
    for number, path in enumerate(episodes):
        rows = read_episode(path)[0]
        reward = rows["next", "reward"].reshape(-1).numpy().astype(np.float64)
        last = np.minimum(np.arange(len(reward)) + n_steps, len(reward)) - 1
        after = rows["next", "observation"].numpy()[last]
        try:
            body, whole = rules.truths(rows["observation"].numpy(), rows["action"].numpy(), after)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        parts.append((body, whole, returns_to_go(reward, gamma), np.full(len(reward), number)))
    return Evidence(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def returns_to_go(reward: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """Returns ``Σ_k γ^k r_{t+k}`` to the end of an episode, ``float64[T]``, of its rewards."""
    total, found = 0.0, np.empty(len(reward))
    for t in range(len(reward) - 1, -1, -1):
        total = reward[t] + gamma * total
        found[t] = total
    return found


def fit_confidences(
    evidence: Evidence, given: Sequence[float], *, min_episodes: int = 10, level: float = 0.05, seed: int = 0
) -> list[Finding]:
    """Tests and fits rules.

    Args:
        evidence: of R rules.
        given: R confidences to begin with; a rule that is seen too rarely keeps its own.
        min_episodes: a rule is tested if the whole of it was seen in that many episodes, and its body without the head
            in that many, too.
        level: largest p with which a rule is supported, in (0, 1).
        seed: of the bootstrap.

    Raises:
        ValueError: all returns are equal.
    """
    low, high = evidence.returns.min(), evidence.returns.max()
    if low == high:
        raise ValueError(
            f"all {len(evidence.returns)} transitions have the return {low:g}, so nothing tells rules apart: record "
            "episodes of which some succeed, such as a trained agent's"
        )
    alone = evidence.body - evidence.whole  # the body without the head
    count = int(evidence.episode.max()) + 1
    seen, contrast = (_episodes_with(truth, evidence.episode, count) for truth in (evidence.whole, alone))
    gain, p = _bootstrap(evidence, alone, count, seed)
    enough = (seen >= min_episodes) & (contrast >= min_episodes)
    supported = enough & (p <= level)
    fitted = np.array(given, np.float64)
    fitted[enough] = 0.0
    if supported.any():
        y = (evidence.returns - low) / (high - low)
        start = np.array(given)[supported]
        fitted[supported] = _fit(evidence.body, evidence.whole[:, supported], y, start)
    findings = []
    for rule, confidence in enumerate(fitted.tolist()):
        status: Literal["fitted", "rejected", "kept"] = "kept"
        if enough[rule]:
            status = "fitted" if supported[rule] else "rejected"
        tested = float(p[rule]) if enough[rule] else float("nan")
        findings.append(Finding(confidence, status, int(seen[rule]), float(gain[rule]), tested))
    return findings


def _episodes_with(truth: NDArray[np.float64], episode: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Returns in how many episodes something was rather true than not, ``int64[R]``."""
    largest = np.zeros((count, truth.shape[1]))
    np.maximum.at(largest, episode, truth)
    return (largest >= _HOLDS).sum(axis=0)


def _bootstrap(
    evidence: Evidence, alone: NDArray[np.float64], count: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns each rule's gain and its p, both ``float64[R]``; NaN and 1 where there is nothing to compare."""
    returns = evidence.returns[:, None]
    columns = (evidence.whole, evidence.whole * returns, alone, alone * returns)
    sums = np.zeros((4, count, alone.shape[1]))  # of each episode
    for total, values in zip(sums, columns, strict=True):
        np.add.at(total, evidence.episode, values)

    def gains(weights: NDArray) -> NDArray[np.float64]:
        held, of_held, missed, of_missed = (weights @ total for total in sums)
        with np.errstate(invalid="ignore", divide="ignore"):
            return of_held / held - of_missed / missed

    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    resampled = gains(drawn)
    usable = np.isfinite(resampled)
    p = (1 + (usable & (resampled <= 0)).sum(axis=0)) / (1 + usable.sum(axis=0))
    return gains(np.ones((1, count)))[0], p


def _fit(
    body: NDArray[np.float64], whole: NDArray[np.float64], y: NDArray[np.float64], start: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the confidences of least cross-entropy, in the module's formula.

    Args:
        body: ``float64[N, R]``, of all rules.
        whole: ``float64[N, S]``, of those that are fitted.
        y: ``float64[N]``.
        start: ``float64[S]``, confidences to begin with.
    """
    situation, rules, target = (torch.from_numpy(array) for array in (body, whole, y))
    first = start.clip(0.01, 0.99)
    logits = torch.from_numpy(np.log(first / (1 - first))).requires_grad_()
    weights = torch.zeros(body.shape[1] + 1, dtype=torch.float64, requires_grad=True)  # w and v
    optimizer = torch.optim.LBFGS([logits, weights], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        missed = torch.nn.functional.logsigmoid(-(situation @ weights[:-1] + weights[-1]))  # log(1 − b)
        missed = missed + torch.log1p(-_ALMOST * torch.sigmoid(logits) * rules).sum(dim=1)
        missed = missed.clamp(max=-1e-12)
        loss = -(target * torch.log(-torch.expm1(missed)) + (1 - target) * missed).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return torch.sigmoid(logits.detach()).numpy()
