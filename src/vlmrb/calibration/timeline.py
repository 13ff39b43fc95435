"""A scorer's answers along an episode or video, in sliding clips, beside what critics expect (the paper's figure 4)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.calibration.videos import as_snapshots, read_frames
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.milestones import MilestonesScorer, milestone_names

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule


@dataclass(frozen=True)
class Recording:
    """An episode or a video.

    Attributes:
        snapshots: ``[T, S]``.
        renderer: draws them.
        times: ``float64[T]``, of each frame.
        unit: of the times.
        events: ``(frame, name)``, in the order of time; empty where nothing is known.
        terminated: whether the last state is a terminal one, of which critics learn nothing.
    """

    snapshots: NDArray
    renderer: Renderer
    times: NDArray[np.float64]
    unit: str
    events: Sequence[tuple[int, str]] = ()
    terminated: bool = False

    def __len__(self) -> int:
        return len(self.snapshots)

    def clips(self, starts: NDArray[np.int64], clip_length: int) -> ClipBatch:
        """Returns the clips that begin at frames ``int64[K]``; one that runs out of frames repeats the last."""
        frames = np.minimum(starts[:, None] + np.arange(clip_length), len(self) - 1)
        lengths = np.minimum(clip_length, len(self) - starts)
        return ClipBatch(starts.astype(np.int64), self.snapshots[frames], lengths.astype(np.int64), self.renderer)


def record_video(path: Path, frame_size: int, every: int = 1) -> Recording:
    """Reads a video.

    Args:
        path: an mp4, a GIF or whatever PyAV reads.
        frame_size: longest side of its frames in pixels; larger ones are scaled down.
        every: take every n-th frame only.

    Raises:
        ValueError: it cannot be read, or has fewer than 2 frames.
    """
    video = read_frames(path, frame_size, every=every)
    if len(video.frames) < 2:
        raise ValueError(f"video {path} is too short for a clip: it takes 2 frames, and {len(video.frames)} is there")
    snapshots, renderer = as_snapshots(video.frames)
    return Recording(snapshots, renderer, video.times, "seconds")


@torch.no_grad()
def record_episode(module: OffPolicyModule, seed: int, epsilon: float) -> Recording:
    """Plays one episode.

    Args:
        module: the agent, with its environment.
        seed: of level and exploration.
        epsilon: share of random actions, in [0, 1].
    """
    from vlmrb.envs import make_env, make_renderer

    env = make_env(module.env, num_envs=1, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    snapshots, succeeded, terminated = [], [], False
    try:
        data = env.reset()
        while True:
            snapshots.append(data["snapshot"][0].numpy().copy())
            data.set("action", module.play(data["observation"], epsilon, generator))
            step, data = env.step_and_maybe_reset(data)
            after = step["next"]
            succeeded.append(bool(after["success"][0]))
            if after["done"][0]:
                snapshots.append(after["snapshot"][0].numpy().copy())
                terminated = bool(after["terminated"][0])
                break
    finally:
        env.close()
    states, renderer = np.stack(snapshots), make_renderer(module.env)
    if milestone_names(renderer):
        events = milestone_events(states, renderer)
    else:
        events = [(frame, "success") for frame, reached in enumerate(succeeded, start=1) if reached]
    return Recording(states, renderer, np.arange(len(states), dtype=np.float64), "env steps", events, terminated)


def milestone_events(snapshots: NDArray, renderer: Renderer) -> list[tuple[int, str]]:
    """Returns the milestones of one episode ``[T, S]`` as ``(frame in which it shows first, name)``."""
    pairs = np.stack([snapshots[:-1], snapshots[1:]], axis=1)
    count = len(pairs)
    batch = ClipBatch(np.arange(count), pairs, np.full(count, 2), renderer)
    happened = MilestonesScorer().events(batch)
    names = milestone_names(renderer)
    return [(int(frame) + 1, names[which]) for frame, which in np.argwhere(happened)]


def window_starts(frames: int, clip_length: int, stride: int) -> NDArray[np.int64]:
    """Returns where sliding clips begin, ``int64[K]``; the last one ends with the last frame, whatever the stride.

    Raises:
        ValueError: the stride is below 1.
    """
    if stride < 1:
        raise ValueError(f"--stride {stride} must be at least 1 frame")
    last = max(frames - clip_length, 0)
    return np.unique(np.append(np.arange(0, last + 1, stride), last))


@torch.no_grad()
def delta_q(
    module: OffPolicyModule, recording: Recording, starts: NDArray[np.int64], steps: int
) -> NDArray[np.float32]:
    """Returns how much better off a critic believes the agent to be ``steps`` steps on: ΔQ(t; L) = Q(s_t+L) − Q(s_t).

    Q(s) is the value of acting at one's best: max_a Q(s, a), or Q(s, π(s)) of SAC and TD3.

    Args:
        module: an agent.
        recording: an episode of the same environment.
        starts: ``int64[K]``, the t.
        steps: L.

    Returns:
        ``float32[K]``, NaN where s_t+L lies beyond the episode or is a terminal state, whose value nobody learns.
    """
    observations = torch.from_numpy(np.ascontiguousarray(recording.renderer.observe(recording.snapshots)))
    values = torch.cat([module.state_value(part) for part in observations.split(256)]).numpy()
    if recording.terminated:
        values[-1] = np.nan
    ahead = starts + steps
    known = ahead < len(values)
    difference = np.full(len(starts), np.nan, np.float32)
    difference[known] = values[ahead[known]] - values[starts[known]]
    return difference


def timeline_csv(
    recording: Recording,
    starts: NDArray[np.int64],
    clip_length: int,
    scores: NDArray[np.float32],
    critics: Mapping[str, NDArray[np.float32]],
) -> str:
    """Returns one line per clip: its first and last frame with their times, what happens in it, score and ΔQs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["first_frame", "last_frame", "from", "to", "events", "score", *(f"delta_q {name}" for name in critics)]
    )
    for row, start in enumerate(starts.tolist()):
        end = min(start + clip_length, len(recording)) - 1
        inside = " ".join(name for frame, name in recording.events if start < frame <= end)
        deltas = ["" if np.isnan(values[row]) else repr(float(values[row])) for values in critics.values()]
        times = [f"{recording.times[frame]:g}" for frame in (start, end)]
        writer.writerow([start, end, *times, inside, repr(float(scores[row])), *deltas])
    return text.getvalue()


def plot_timeline(
    path: Path,
    recording: Recording,
    starts: NDArray[np.int64],
    clip_length: int,
    scores: NDArray[np.float32],
    critics: Mapping[str, NDArray[np.float32]],
    scorer: str,
    threshold: float,
) -> None:
    """Draws frames, score and ΔQ over time; a clip's values stand at its middle.

    Args:
        path: a PNG.
        recording: what was scored.
        starts: ``int64[K]``, first frames of the clips.
        clip_length: L.
        scores: ``float32[K]``.
        critics: name → ΔQ, ``float32[K]``.
        scorer: its name.
        threshold: τ.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    strip = film_strip(recording)
    times = recording.times
    middle = (times[starts] + times[np.minimum(starts + clip_length, len(times)) - 1]) / 2
    heights = [min(9.0 * strip.shape[0] / strip.shape[1], 2.0), 2.0] + [1.6] * bool(critics)
    figure = Figure(figsize=(9.6, sum(heights) + 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    frames, *panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    frames.imshow(strip, extent=(times[0], times[-1], 0, 1), aspect="auto", interpolation="nearest")
    frames.set_yticks([])
    frames.spines[:].set_visible(False)
    frames.tick_params(bottom=False)
    marker = "." if len(starts) < 60 else None
    panels[0].plot(middle, scores, color="#0072B2", linewidth=1.8, marker=marker, label=scorer)
    panels[0].axhline(threshold, color="#888888", linewidth=1.0, linestyle="--", label=f"τ = {threshold:g}")
    panels[0].set(ylim=(-0.03, 1.03), ylabel="score")
    for (name, values), color in zip(critics.items(), ("#D55E00", "#009E73", "#CC79A7", "#E69F00") * 8, strict=False):
        panels[1].plot(middle, values, color=color, linewidth=1.5, marker=marker, label=name)
    if critics:
        panels[1].axhline(0.0, color="#888888", linewidth=0.8)
        panels[1].set_ylabel(f"ΔQ(t; {clip_length})")
    for panel in panels:
        panel.grid(color="#e4e4e4", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        for frame, _ in recording.events:
            panel.axvline(times[frame], color="#444444", linewidth=1.0, linestyle=":")
        panel.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for frame, name in recording.events:
        late = times[frame] > times[0] + 0.9 * (times[-1] - times[0])  # its name would run into the legend
        place, shift = (times[frame], 1.0), (-2 if late else 2, 2)
        panels[0].annotate(
            name,
            place,
            shift,
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if late else "left",
            fontsize=8,
        )
    panels[-1].set(xlabel=f"{recording.unit}; values at the middle of each {clip_length}-frame clip")
    panels[-1].set_xlim(times[0], times[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def film_strip(recording: Recording, count: int = 10, frame_size: int = 160) -> NDArray[np.uint8]:
    """Lays ``count`` frames side by side, each in the middle of its share of time: ``uint8[H, count·W, 3]``."""
    times = recording.times
    wanted = times[0] + (np.arange(count) + 0.5) / count * (times[-1] - times[0])
    which = np.abs(times[None] - wanted[:, None]).argmin(axis=1)
    frames = recording.renderer.render(recording.snapshots[which], None)
    if max(frames.shape[1:3]) > frame_size:
        frames = recording.renderer.render(recording.snapshots[which], frame_size)
    frames = np.pad(frames, ((0, 0), (0, 0), (1, 1), (0, 0)), constant_values=255)
    return np.concatenate(list(frames), axis=1)
