"""Which scorers are compared, and how clips get their scores: through the cache, so that nothing is scored twice."""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.prompts import make_prompt
from vlmrb.scoring.scorer import Scorer, ScorerError, checked_scores, identity, require_thinnable
from vlmrb.settings import load_scoring, read_section

DEFAULT_THRESHOLD = 0.5  # the paper's τ


@dataclass(frozen=True)
class Candidate:
    """A scorer to be judged.

    Attributes:
        label: tells it from the others in tables: its file's name, or the scorer's own if it is the only one.
        scorer: not set up yet.
        class_path: of the scorer.
        prompt: as it was asked for on the command line; ``None`` leaves the configuration's.
        threshold: τ of the configuration, where it has one.
        batch_clips: most clips in one call.
        frames_per_clip: most frames of a clip that it is shown; ``None`` shows all.
        cache: file or folder of its own cache; ``None`` takes the one of the results.
        files: configurations that it was read from.
    """

    label: str
    scorer: Scorer
    class_path: str
    prompt: str | None
    threshold: float
    batch_clips: int
    frames_per_clip: int | None
    cache: str | None
    files: tuple[str, ...]

    def shown(self, clips: ClipBatch) -> ClipBatch:
        """Returns clips as the scorer is shown them."""
        return clips if self.frames_per_clip is None else clips.thinned(self.frames_per_clip)

    def varied(self, scoring: Mapping[str, Any]) -> Candidate:
        """Returns the same scorer anew, with other settings in its `scoring` section.

        Args:
            scoring: them, as in a configuration.

        Raises:
            ValueError: a setting cannot work.
        """
        return _load(self.files, self.label, self.prompt, scoring)


@dataclass(frozen=True)
class Scored:
    """The scores of some clips.

    Attributes:
        scores: ``float32[N]`` in [0, 1].
        fresh: clips that were really scored, not found in the cache.
        clips_per_s: of those, without the first batch, which often warms up; NaN if there are too few.
        stats: what the scorer says about itself afterwards; empty if nothing was really scored.
    """

    scores: NDArray[np.float32]
    fresh: int
    clips_per_s: float
    stats: dict[str, float]


def load_candidates(
    configs: Sequence[str], scorers: Sequence[str] = (), prompts: Sequence[str] = ()
) -> list[Candidate]:
    """Loads every combination of scorer and prompt.

    Args:
        configs: configuration files that all share, later ones over earlier ones.
        scorers: configuration files that name one scorer each; none judges the scorer in ``configs``.
        prompts: names or texts; none leaves each scorer its own.

    Raises:
        ValueError: there is no scorer, a scorer takes no prompt, or two candidates would be the same.
    """
    if not configs and not scorers:
        raise ValueError("no scorer named: pass -c configs/scorer/….yaml, or --scorers with several such files")
    for option, named in (("--scorers", scorers), ("--prompts", prompts)):
        if twice := [one for one in named if named.count(one) > 1]:
            raise ValueError(f"{option} names {twice[0]} twice")
    candidates: list[Candidate] = []
    for file in scorers or [""]:
        files = [*configs, file] if file else list(configs)
        for prompt in prompts or [""]:
            candidate = _load(files, Path(file).stem, prompt or None)
            named = f"{candidate.label}, {make_prompt(prompt).name} prompt" if prompt else candidate.label
            candidates.append(replace(candidate, label=named))
    labels = [candidate.label for candidate in candidates]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"two candidates would be called {twice[0]!r}: files of --scorers must differ in their names")
    return candidates


def _load(files: Sequence[str], label: str, prompt: str | None, changes: Mapping[str, Any] | None = None) -> Candidate:
    """Reads a candidate: what the files say, over them its prompt, and over both the changes to ``scoring``."""
    scoring = load_scoring(files)
    class_path = f"{type(scoring.scorer).__module__}.{type(scoring.scorer).__qualname__}"
    overlays: list[Mapping[str, Any]] = []
    if prompt is not None:
        if "prompt" not in inspect.signature(type(scoring.scorer)).parameters:
            raise ValueError(f"--prompts: the scorer {class_path} takes no prompt")
        make_prompt(prompt)
        overlays.append({"scorer": {"init_args": {"prompt": prompt}}})
    overlays += [changes] if changes else []
    if overlays:
        with tempfile.TemporaryDirectory() as folder:
            written = [Path(folder) / f"{number}.yaml" for number in range(len(overlays))]
            for path, overlay in zip(written, overlays, strict=True):
                path.write_text(yaml.safe_dump({"scoring": dict(overlay)}))
            scoring = load_scoring([*files, *written])
    assert scoring.scorer is not None
    require_thinnable(scoring.scorer, scoring.config.frames_per_clip)
    return Candidate(
        label=label or identity(scoring.scorer)[0],
        scorer=scoring.scorer,
        class_path=class_path,
        prompt=prompt,
        threshold=_threshold(files),
        batch_clips=scoring.config.batch_clips,
        frames_per_clip=scoring.config.frames_per_clip,
        cache=None if scoring.cache in (None, "memory") else scoring.cache,
        files=tuple(files),
    )


def _threshold(files: Sequence[str]) -> float:
    """Returns the last τ that the files name; raw scores (null) count as none."""
    threshold = DEFAULT_THRESHOLD
    for file in files:
        vlm = read_section(file, "replay", "vlm")
        if vlm.get("threshold") is not None:
            threshold = vlm["threshold"]
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise ValueError(f"replay.vlm.threshold={threshold!r} must be a number in [0, 1]")
    return float(threshold)


def require_readable(scorer: Scorer, source: str) -> None:
    """Refuses a scorer that reads states where there are only videos.

    Raises:
        ValueError: naming the scorer.
    """
    if scorer.needs != "frames":
        raise ValueError(
            f"scorer {scorer.name!r} reads {scorer.needs}, and {source} has only frames: use one that looks at frames"
        )


def score_clips(
    candidate: Candidate,
    count: int,
    batch: Callable[[NDArray[np.int64]], ClipBatch],
    cache: ScoreCache,
    progress: bool = True,
) -> Scored:
    """Scores clips, each content once; what is in the cache is not asked for again.

    Args:
        candidate: who scores; set up only if something is left to score.
        count: N.
        batch: hands over the clips at positions ``int64[K]``, with all their frames.
        cache: where scores are looked up and kept, batch by batch.
        progress: show a progress bar.

    Raises:
        ValueError: the scorer fails on clips.
        ScorerError: the scorer cannot be set up, or breaks its contract.
    """
    keys: list[bytes] = []
    for start in range(0, count, 256):
        keys += cache.keys(candidate.scorer, candidate.shown(batch(np.arange(start, min(start + 256, count)))))
    known = dict(zip(keys, cache.get_many(keys).tolist(), strict=True))
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    missing = np.sort([first[key] for key, score in known.items() if np.isnan(score)]).astype(np.int64)
    spent: list[tuple[int, float]] = []
    idle = not progress or not len(missing)
    with (
        _set_up(candidate.scorer, bool(len(missing))),
        tqdm(total=len(missing), unit="clip", desc=candidate.label, disable=idle) as bar,
    ):
        for start in range(0, len(missing), candidate.batch_clips):
            rows = missing[start : start + candidate.batch_clips]
            began = time.perf_counter()
            scores = ask(candidate.scorer, candidate.shown(batch(rows)))
            spent.append((len(rows), time.perf_counter() - began))
            part = [keys[row] for row in rows]
            cache.put_many(part, scores)
            known.update(zip(part, scores.tolist(), strict=True))
            bar.update(len(rows))
        stats = dict(candidate.scorer.stats()) if len(missing) else {}
    warm = spent[1:]
    speed = sum(clips for clips, _ in warm) / sum(seconds for _, seconds in warm) if warm else float("nan")
    return Scored(np.array([known[key] for key in keys], np.float32), len(missing), speed, stats)


def ask(scorer: Scorer, clips: ClipBatch) -> NDArray[np.float32]:
    """Scores clips as they are: ``float32[B]`` in [0, 1].

    Raises:
        ValueError: the scorer fails on them.
        ScorerError: the scorer breaks its contract.
    """
    try:
        return checked_scores(scorer, clips)
    except ScorerError:
        raise
    except Exception as error:
        raise ValueError(f"scorer {scorer.name!r} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _set_up(scorer: Scorer, needed: bool) -> Iterator[None]:
    if not needed:
        yield
        return
    try:
        scorer.setup()
        yield
    finally:
        scorer.close()
