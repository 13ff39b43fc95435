"""The verbs of the offline check: `vlmrb corpus`, `vlmrb calibrate`, `vlmrb score`."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vlmrb.calibration.policies import PolicyName

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule
    from vlmrb.envs.config import EnvConfig


def corpus(
    out: str,
    configs: Sequence[str] = (),
    policy: PolicyName = "random",
    clips: int = 2000,
    ckpt: str | None = None,
    epsilon: float = 0.05,
    seed: int = 0,
    clip_length: int | None = None,
    successes: float = 0.2,
    milestones: float = 0.3,
    stratify: bool = True,
    max_env_steps: int = 2_000_000,
    videos: str | None = None,
    labels: str | None = None,
    frame_size: int = 224,
    env: Sequence[str] = (),
) -> int:
    """Collects labelled clips for `vlmrb calibrate`, from an environment or from your own videos.

    Repeat the command to go on after an interruption: the same folder comes out.

    Args:
        out: folder of the corpus.
        configs: configurations with an `env` section, as for `vlmrb fit`; also written -c.
        policy: who plays: `random`, `scripted` (an expert and chance by turns) or `checkpoint`.
        clips: how many clips.
        ckpt: the agent of `--policy checkpoint`; without -c its environment is taken, too.
        epsilon: exploration rate of that agent.
        seed: of levels, play and choice.
        clip_length: frames per clip; the configuration's replay.clip_length, or 32, if not given.
        successes: wanted share of clips in which the goal is reached.
        milestones: wanted share of clips with a milestone but without the goal, where milestones are known.
        stratify: seek these shares; false takes clips as they come.
        max_env_steps: env steps after which kinds that are still lacking are filled up with others.
        videos: folder of your own mp4s or GIFs, instead of an environment.
        labels: CSV file for them with the columns file,label and, if wanted, start,end in seconds.
        frame_size: longest side of the frames kept of videos, in pixels.
        env: settings of the environment, over those of -c or --ckpt, written as for `vlmrb fit`: --env.max_steps 100.
    """
    from vlmrb.calibration.collect import CollectSettings, collect
    from vlmrb.calibration.labelled_videos import collect_videos
    from vlmrb.calibration.policies import make_player

    logging.getLogger("torchrl").setLevel(logging.WARNING)  # it announces every buffer
    folder, command = Path(out), _command()
    if videos is not None or labels is not None:
        if videos is None or labels is None:
            raise ValueError("--videos and --labels go together: a folder, and a CSV file with the columns file,label")
        if configs or ckpt or env:
            raise ValueError("--videos come without an environment: leave out -c, --ckpt and --env")
        made = collect_videos(
            folder,
            Path(videos),
            Path(labels),
            clip_length=32 if clip_length is None else clip_length,
            frame_size=frame_size,
            command=command,
        )
    else:
        config, usual = _environment(configs, ckpt, env)
        length = usual if clip_length is None else clip_length
        settings = CollectSettings(clips, length, seed, successes, milestones, stratify, max_env_steps)
        facts = {"policy": policy} | ({"ckpt": ckpt, "epsilon": epsilon} if policy == "checkpoint" else {})
        made = collect(folder, config, make_player(policy, config, ckpt, epsilon), facts, settings, command)
    sys.stdout.write(json.dumps({"corpus": str(folder), **made.manifest["counts"]}, indent=2) + "\n")
    return 0


def calibrate(
    corpus: str,
    out: str,
    configs: Sequence[str] = (),
    scorers: Sequence[str] = (),
    prompts: Sequence[str] = (),
    label: Literal["success", "milestone"] | None = None,
    shown: int = 6,
    frontier: bool = False,
    frames: Sequence[int] = (),
    frame_sizes: Sequence[int] = (),
    batches: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    tolerance: float = 0.01,
    timed_clips: int = 64,
    rounds: int = 6,
) -> int:
    """Judges scorers and prompts on a corpus: an HTML page, PNGs, GIFs, report.json, scores.csv and calibrated.yaml.

    With --frontier also what one scorer's scores cost, and which cheaper way of asking it is worth as much:
    frontier.csv, frontier.png and frontier.yaml. Scores are kept as they come, so that a repeated command goes on where
    it stopped; speed is measured anew.

    Args:
        corpus: folder made by `vlmrb corpus`.
        out: folder for the report.
        configs: configurations with a `scoring` section, later ones over earlier ones; also written -c.
        scorers: configurations of several scorers to compare, each on top of -c.
        prompts: names or texts of prompts to compare, with each scorer.
        label: by what τ is chosen; if not given, by milestones where they are known, else by success.
        shown: most clips of each kind on the page.
        frontier: vary one setting of the scorer at a time, and measure speed beside ROC AUC.
        frames: frames per clip to try; 32 16 8 4, as far as clips are so long, if not given.
        frame_sizes: sizes of frames to try, in pixels; half the configured one if not given.
        batches: clips in one pass of the scorer to try; twice the configured ones if not given.
        dtypes: dtypes of the scorer to try; bfloat16 with a GPU, none without, if not given.
        tolerance: ROC AUC that may be lost for speed.
        timed_clips: how many clips are timed.
        rounds: how often each way is timed, in turns with the others; at least 6.
    """
    from vlmrb.calibration.corpus import load_corpus
    from vlmrb.calibration.frontier import Grid, find_frontier, plan
    from vlmrb.calibration.report import choose_label
    from vlmrb.calibration.scores import load_candidates, require_readable, score_clips
    from vlmrb.calibration.writing import write_report
    from vlmrb.locks import lock_folder
    from vlmrb.scoring.cache import ScoreCache

    if shown < 0:
        raise ValueError(f"--shown {shown} must not be negative")
    tried = (tuple(frames), tuple(frame_sizes), tuple(batches), tuple(dtypes))
    grid = Grid(*tried, tolerance, timed_clips, rounds)
    if not frontier and grid != Grid():
        raise ValueError("--frames, --frame_sizes, --batches, --dtypes and the like say what --frontier tries: add it")
    candidates = load_candidates(configs, scorers, prompts)
    if frontier and len(candidates) > 1:
        raise ValueError(f"--frontier is of one scorer with one prompt, and here are {len(candidates)} of them")
    clips = load_corpus(corpus)
    label_name = choose_label(clips, label)
    if clips.manifest["kind"] == "videos":
        for candidate in candidates:
            require_readable(candidate.scorer, f"corpus {corpus}")
    points = plan(clips, candidates[0], grid) if frontier else []
    folder, command = Path(out), _command()
    with lock_folder(folder, "--out "):
        scored, found = [], None
        for candidate in candidates:
            cache = ScoreCache(candidate.cache or folder / "scores.sqlite")
            try:
                scored.append(score_clips(candidate, len(clips.clips), clips.batch, cache))
                found = find_frontier(clips, points, label_name, grid, cache) if points else None
            finally:
                cache.close()
        lines = write_report(folder, clips, candidates, scored, label_name, shown, command, found)
        if found is not None:
            lines.append(f"chosen: {found.points[found.chosen].label}: {folder / 'frontier.yaml'}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.write(f"{folder / 'index.html'}\n")
    return 0


def score(
    configs: Sequence[str] = (),
    video: str | None = None,
    run: str | None = None,
    out: str | None = None,
    ckpt: Sequence[str] = (),
    clip_length: int | None = None,
    stride: int = 1,
    every: int = 1,
    frame_size: int | None = None,
    seed: int = 1_000_003,
    epsilon: float = 0.05,
) -> int:
    """Scores sliding clips of a video, or of an episode that a run's agent plays, and draws the timeline (PNG, CSV).

    Args:
        configs: configurations with a `scoring` section, later ones over earlier ones; also written -c.
        video: an mp4 or a GIF.
        run: a folder of `vlmrb fit`; its latest agent plays an episode.
        out: folder for timeline.png and timeline.csv; one in the run's folder, or beside the video, if not given.
        ckpt: checkpoints whose critics to ask for ΔQ along the episode; the run's latest if not given.
        clip_length: frames per clip; the configuration's or the run's replay.clip_length, or 32, if not given.
        stride: frames between the beginnings of two clips.
        every: take every n-th frame of a video only.
        frame_size: longest side of a video's frames in pixels; the scorer's own, or 512, if not given.
        seed: of the episode.
        epsilon: exploration rate in the episode.
    """
    from vlmrb.calibration.manifest import write_whole
    from vlmrb.calibration.policies import require_epsilon
    from vlmrb.calibration.scores import load_candidates, require_readable, score_clips
    from vlmrb.calibration.timeline import (
        delta_q,
        plot_timeline,
        record_episode,
        record_video,
        timeline_csv,
        window_starts,
    )
    from vlmrb.locks import lock_folder
    from vlmrb.media import encode_gif, enlarge
    from vlmrb.scoring.cache import ScoreCache

    if (video is None) == (run is None):
        raise ValueError("name what to score: either --video FILE or --run DIR")
    for name, value in (("clip_length", clip_length), ("every", every), ("frame_size", frame_size)):
        if value is not None and value < (2 if name == "clip_length" else 1):
            raise ValueError(f"--{name} {value} is too small")
    if seed < 0:
        raise ValueError(f"--seed {seed} must not be negative")
    require_epsilon(epsilon)
    (candidate,) = load_candidates(configs)
    length = clip_length or _clip_length(configs)
    critics = {}
    if video is not None:
        if ckpt:
            raise ValueError("--ckpt: critics read the agent's observations, which a video does not hold; use --run")
        require_readable(candidate.scorer, f"video {video}")
        recording = record_video(Path(video), frame_size or candidate.scorer.frame_size or 512, every)
        folder = Path(out) if out is not None else Path(video).with_name(f"{Path(video).stem}_timeline")
        starts = window_starts(len(recording), length, stride)
    else:
        assert run is not None
        module = _latest_agent(Path(run))
        length = clip_length or module.replay.clip_length or length
        recording = record_episode(module, seed, epsilon)
        folder = Path(out) if out is not None else Path(run) / "timeline"
        starts = window_starts(len(recording), length, stride)
        critics = {
            name: delta_q(agent, recording, starts, length) for name, agent in _critics(ckpt, module, run).items()
        }
    with lock_folder(folder, "--out "):
        cache = ScoreCache(candidate.cache)
        try:
            scored = score_clips(candidate, len(starts), lambda rows: recording.clips(starts[rows], length), cache)
        finally:
            cache.close()
        if run is not None:
            frames = recording.renderer.render(recording.snapshots, None)
            write_whole(folder / "episode.gif", encode_gif(enlarge(frames), fps=8))
        table = timeline_csv(recording, starts, length, scored.scores, critics)
        write_whole(folder / "timeline.csv", table.encode())
        picture = folder / "timeline.png"
        plot_timeline(picture, recording, starts, length, scored.scores, critics, candidate.label, candidate.threshold)
    sys.stdout.write(f"{folder / 'timeline.png'}\n")
    return 0


def _latest_agent(run: Path) -> OffPolicyModule:
    from vlmrb.algorithms.base import OffPolicyModule

    path = run / "checkpoints" / "last.ckpt"
    if not path.is_file():
        raise ValueError(f"--run {run} holds no {path.relative_to(run)}: name a folder that vlmrb fit has written")
    return OffPolicyModule.from_checkpoint(path)


def _critics(ckpt: Sequence[str], module: OffPolicyModule, run: str) -> dict[str, OffPolicyModule]:
    """Loads the critics, by names just long enough to tell them apart in a legend.

    Raises:
        ValueError: one of them has learned in another environment, or is named twice.
    """
    from vlmrb.algorithms.base import OffPolicyModule

    folders = [Path(path).resolve().parent.parent for path in ckpt] or [Path(run).resolve()]
    critics = [OffPolicyModule.from_checkpoint(path) for path in ckpt] or [module]
    for path, critic in zip(ckpt, critics, strict=False):
        if critic.env.id != module.env.id:
            raise ValueError(f"--ckpt {path} was trained on {critic.env.id}, and the episode is of {module.env.id}")
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        named = {f"{name}, {critic.env_steps:,} env steps": critic for name, critic in zip(names, critics, strict=True)}
        if len(named) == len(critics):
            return named
    raise ValueError("--ckpt names checkpoints that are the same: " + ", ".join(ckpt))


def _environment(configs: Sequence[str], ckpt: str | None, flags: Sequence[str]) -> tuple[EnvConfig, int]:
    """Returns environment and clip length of the configurations, or else of the checkpoint; flags go over both."""
    from vlmrb.settings import load_env

    if configs or (flags and ckpt is None):
        return load_env(configs, flags), _clip_length(configs)
    if ckpt is None:
        raise ValueError(
            "no environment named: pass -c with a configuration that has an env section, --env.id, or --videos"
        )
    from vlmrb.algorithms.base import OffPolicyModule

    module = OffPolicyModule.from_checkpoint(ckpt)
    return load_env((), flags, module.env) if flags else module.env, module.replay.clip_length or 32


def _clip_length(configs: Sequence[str]) -> int:
    """Returns the last clip length that the configurations name, so that clips are those of training."""
    from vlmrb.settings import read_section

    lengths = [read_section(file, "replay").get("clip_length") for file in configs]
    return next((length for length in reversed(lengths) if isinstance(length, int)), 32)


def _command() -> str:
    return shlex.join(["vlmrb", *sys.argv[1:]])
