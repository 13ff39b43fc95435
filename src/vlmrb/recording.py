"""`vlmrb record`: plays episodes and keeps all of them, for a run to start with."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from tqdm import tqdm  # type: ignore[import-untyped]

from vlmrb.calibration.policies import MakePlayer, PolicyName, make_player
from vlmrb.envs import EnvConfig, make_env
from vlmrb.ranges import POSITIVE, require
from vlmrb.replay.prefill import write_episode
from vlmrb.replay.storage import GIB
from vlmrb.settings import load_env

log = logging.getLogger(__name__)


PATTERN = "episode-*.npz"
MEMORY_GIB: Final = 4.0
_OBJECTS: Final = 800  # bytes that Python takes for the arrays and numbers of an env step, beside their content


def episode_files(folder: Path) -> list[Path]:
    """Returns the episodes in a folder, in the order of their names."""
    return sorted(folder.glob(PATTERN))


@dataclass(frozen=True)
class Recording:
    """What a folder of episodes was recorded with, in its ``recording.json``.

    Attributes:
        env: the environment; numbers of instances and frame settings do not matter to who starts a run with it.
        policy: who played.
        episodes: how many were asked for.
        ckpt: the agent.
        epsilon: share of its random actions.
        seed: of levels and actions.
        memory_gib: what episodes under way might take; longer ones were cut.
        complete: whether all episodes are there.
    """

    env: EnvConfig
    policy: PolicyName
    episodes: int
    ckpt: str | None
    epsilon: float
    seed: int
    memory_gib: float = MEMORY_GIB
    complete: bool = False

    def write(self, folder: Path) -> None:
        """Writes the file."""
        (folder / "recording.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Recording | None:
        """Reads the file; ``None`` if there is none, as with episodes from elsewhere.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        path = folder / "recording.json"
        if not path.exists():
            return None
        try:
            settings = json.loads(path.read_text())
            return cls(**{**settings, "env": EnvConfig(**settings["env"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read by this version: {error}") from error


def record(
    out: str,
    configs: Sequence[str] = (),
    policy: PolicyName = "scripted",
    episodes: int = 100,
    ckpt: str | None = None,
    epsilon: float = 0.05,
    seed: int = 0,
    memory_gib: float = MEMORY_GIB,
) -> int:
    """Plays episodes and writes each to a file; start a run with them by `vlmrb fit --prefill FOLDER`.

    Repeat the command after an interruption: it plays the same episodes again.

    Args:
        out: folder for the episodes, new or without any.
        configs: configurations with an `env` section, as for `vlmrb fit`; also written -c.
        policy: who plays: `random`; `scripted`, an expert and chance by turns, where there is one; `checkpoint`.
        episodes: how many.
        ckpt: the agent's checkpoint (`checkpoint` only).
        epsilon: share of the agent's actions that are random (`checkpoint` only).
        seed: of levels and actions.
        memory_gib: memory for the episodes under way, in GiB, and as much again while one is written. Where they need
            more, the longest is cut: its rows so far are written, as of an episode that ran into its horizon.
    """
    require(POSITIVE, "record", memory_gib=memory_gib)
    if episodes < 1:
        raise ValueError(f"--episodes {episodes} must be at least 1")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--out {out} is a file: name a folder")
    config = load_env(configs)
    recording = Recording(config, policy, episodes, ckpt, epsilon, seed, memory_gib)
    begun = Recording.read(folder)
    if begun is None and episode_files(folder) or begun is not None and (begun.complete or begun != recording):
        raise FileExistsError(f"--out {out} already holds recorded episodes: name another folder")
    player = make_player(policy, config, ckpt, epsilon)
    folder.mkdir(parents=True, exist_ok=True)
    recording.write(folder)
    successes = cut = 0
    played = play_episodes(config, player, episodes, seed, memory_gib)
    for number, episode in enumerate(tqdm(played, "record", episodes, unit="episode", disable=None)):
        if episode.cut and not cut:
            log.warning(
                "episode %d was cut after %s env steps: those under way take more than --memory_gib %g; a smaller "
                "env.max_steps, env.num_envs or env.frame_size keeps episodes whole",
                number,
                f"{len(episode.action):,}",
                memory_gib,
            )
        write_episode(
            folder / f"episode-{number:05d}.npz",
            observation=episode.observation,
            snapshot=episode.snapshot,
            action=episode.action,
            reward=episode.reward,
            success=episode.success,
            terminated=episode.terminated,
        )
        cut += episode.cut
        successes += bool(episode.success.any())
    replace(recording, complete=True).write(folder)
    cuts = f", {cut} cut" if cut else ""
    log.info("%d episodes in %s, %d of them successful%s", episodes, folder, successes, cuts)
    return 0


@dataclass(frozen=True)
class Episode:
    """One episode of T env steps.

    Attributes:
        observation: ``[T + 1, …]``, the last one after the last step.
        snapshot: ``[T + 1, S]``.
        action: ``int64[T]`` or ``float32[T, A]``.
        reward: ``float32[T]``.
        success: ``bool[T]``, the goal was reached by that step.
        terminated: whether the last state is terminal.
        cut: whether it did not end there, but took too much memory.
    """

    observation: NDArray
    snapshot: NDArray
    action: NDArray
    reward: NDArray[np.float32]
    success: NDArray[np.bool_]
    terminated: bool
    cut: bool


class _Running:
    """An episode under way: copies of what is recorded, one entry per env step."""

    def __init__(self) -> None:
        self._kept: dict[str, list[NDArray]] = {
            name: [] for name in ("observation", "snapshot", "action", "reward", "success")
        }

    def __len__(self) -> int:
        return len(self._kept["action"])

    def add(self, step: TensorDictBase, row: int) -> None:
        """Takes the step ``[n]`` of one instance; copies, as a part of an array keeps all of it in memory."""
        for name, entries in self._kept.items():
            source = step["next"] if name in ("reward", "success") else step
            entries.append(source[name][row].numpy().copy())

    def end(self, step: TensorDictBase, row: int, cut: bool) -> Episode:
        """Returns the episode, whose last step was in ``step``, and forgets it."""
        after = step["next"][row]
        for name in ("observation", "snapshot"):
            self._kept[name].append(after[name].numpy())
        stacked = {name: np.stack(self._kept.pop(name)) for name in list(self._kept)}  # each list goes with its array
        reward, success = stacked.pop("reward").reshape(-1), stacked.pop("success").reshape(-1)
        return Episode(**stacked, reward=reward, success=success, terminated=bool(after["terminated"]), cut=cut)


def play_episodes(
    config: EnvConfig, make_player: MakePlayer, episodes: int, seed: int, memory_gib: float = MEMORY_GIB
) -> Iterator[Episode]:
    """Plays whole episodes, the same number in every instance, so that short ones are not preferred.

    Args:
        config: the environment.
        make_player: who plays.
        episodes: how many.
        seed: of levels and actions.
        memory_gib: what episodes under way may take; where they take more, the longest is cut and a new one begins.

    Yields:
        Each episode when it ends.

    Raises:
        ValueError: an episode does not end.
    """
    env_seed, player_seed = np.random.SeedSequence(seed).generate_state(2).tolist()
    count = min(config.num_envs, episodes)
    env = make_env(config, num_envs=count, seed=env_seed)
    player = make_player(env, player_seed)
    missing = np.diff(np.linspace(0, episodes, count + 1).astype(np.int64))  # of each instance
    running = [_Running() for _ in range(count)]
    try:
        root = env.reset()
        step_bytes = _OBJECTS + sum(root[name][0].nbytes for name in ("observation", "snapshot"))
        most = int(memory_gib * GIB / step_bytes)  # env steps under way; the same at every try
        while missing.any():
            with torch.no_grad():
                step, root = env.step_and_maybe_reset(root.set("action", player(root)))
            ended = step["next", "done"].reshape(-1).numpy()
            for row in np.flatnonzero(missing).tolist():
                running[row].add(step, row)
                if ended[row]:
                    yield running[row].end(step, row, cut=False)
                    running[row] = _Running()
                    missing[row] -= 1
                config.check_length(len(running[row]))
            lengths = np.array([len(episode) for episode in running])
            cut = np.zeros((count, 1), np.bool_)
            while lengths.sum() > most:
                row = int(lengths.argmax())
                yield running[row].end(step, row, cut=True)
                running[row] = _Running()
                missing[row] -= 1
                lengths[row], cut[row] = 0, True
            if cut.any():
                root = env.reset(root.set("_reset", torch.from_numpy(cut)))
    finally:
        env.close()
