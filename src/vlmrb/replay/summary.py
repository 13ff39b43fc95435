"""Says in words what a replay scheme is, and which of its settings can have no effect within a budget."""

from __future__ import annotations

from collections.abc import Iterator

from vlmrb.replay.config import ReplayConfig


def formula(replay: ReplayConfig) -> str:
    """Returns a scheme in one line, such as ``λ 0 → 0.5, p = 1[r > 0.5] · |δ|``."""
    factors = list(_factors(replay))
    parts = []
    if factors and replay.lam_max:
        lam = f"{replay.lam_max:g}"
        parts.append(f"λ {lam if not replay.warmup_fraction else f'0 → {lam}'}, p = {' · '.join(factors)}")
    else:
        parts.append("uniform")
    if replay.stratified:
        parts.append("stratified")
    if replay.importance_weights is not None:
        betas = replay.importance_weights
        parts.append(f"importance weights β {betas.beta_start:g} → {betas.beta_end:g}")
    if replay.aer is not None:
        parts.append(f"the most similar of {replay.aer.candidates:g} candidates each (AER)")
    if replay.her is not None:
        parts.append(f"{replay.her.share:.0%} relabelled ({replay.her.strategy}, HER)")
    if replay.score_reward is not None:
        threshold = replay.score_reward.threshold
        score = "r" if threshold is None else f"1[r > {threshold:g}]"
        parts.append(f"reward + {replay.score_reward.weight:g} · {score} ({replay.score_reward.mode})")
    return ", ".join(parts)


def _factors(replay: ReplayConfig) -> Iterator[str]:
    if replay.vlm is not None:
        positive = f"1[r > {replay.vlm.threshold:g}]" if replay.vlm.threshold is not None else _power("r", replay.vlm)
        yield positive
    if replay.credit is not None:
        yield f"credit (window {replay.credit.window})"
    if replay.td is not None:
        yield _power(f"(|δ| + {replay.td.eps:g})" if replay.td.eps else "|δ|", replay.td)
    if replay.rank is not None:
        yield f"rank(|δ|)^−{replay.rank.exponent:g}"
    if replay.relo is not None:
        yield _power(f"({replay.relo.map}(L − L_target) + {replay.relo.eps:g})", replay.relo)
    if replay.rules is not None:
        yield f"exp({replay.rules.eta:g} · rules)"
    if replay.age is not None:
        yield f"exp(−age / {replay.age.turnover * replay.capacity:,.0f})"
    if replay.ero is not None:
        yield "mask (ERO)"


def _power(base: str, term: object) -> str:
    exponent = float(getattr(term, "exponent"))  # noqa: B009 — of configurations that have one
    return base if exponent == 1 else f"{base}^{exponent:g}"


def idle_settings(replay: ReplayConfig, total_env_steps: int) -> Iterator[str]:
    """Yields what can have no effect in a run of ``total_env_steps``, each with what to do about it.

    Some settings are shares of the buffer's capacity, and do nothing in a run that is much shorter than that.
    """
    lower = f"lower replay.capacity={replay.capacity:,} with the budget"
    if replay.ero is not None and (window := replay.ero.window_fraction * replay.capacity) >= total_env_steps:
        yield f"replay.ero draws its first mask after {window:,.0f} env steps, beyond the budget: {lower}"
    if replay.age is not None and (tau := replay.age.turnover * replay.capacity) > 2 * total_env_steps:
        yield f"replay.age lets rows fade over {tau:,.0f} env steps, far beyond the budget: {lower}"
    if replay.rank is not None and (rows := replay.rank.refresh_fraction * replay.capacity) >= total_env_steps:
        yield f"replay.rank ranks all rows anew every {rows:,.0f} env steps, beyond the budget: {lower}"
