"""Collects a corpus from an environment, cut exactly as training cuts its clips: by the replay buffer itself.

Clips come in *rounds*, each with environments, a player and random numbers of its own, so that a round depends on
nothing but its number: whoever is interrupted repeats the round that was under way, and gets the same corpus.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from vlmrb.algorithms.collector import ReplayCollector
from vlmrb.calibration.corpus import ClipLabels, Corpus, CorpusWriter, LabelledClips, env_facts, load_corpus
from vlmrb.calibration.policies import MakePlayer
from vlmrb.doctor import GIB, free_memory_bytes
from vlmrb.envs import EnvConfig, make_env, make_renderer
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.milestones import MilestonesScorer, milestone_names

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

logger = logging.getLogger(__name__)

SUCCESS, MILESTONE, NOTHING = range(3)  # the strata
STRATA = ("success", "milestone", "nothing")

ROUND_STEPS = 1024  # env steps of each instance in a round, at most: a whole episode of most tasks
CHOICE = 4  # clips in a round for each that may be kept of it, so that there is something to choose from
ROUND_BYTES = 256 << 20  # of the snapshots of a round, at most
ROUNDS = 8  # a corpus comes from at least as many, so that it holds many levels


@dataclass(frozen=True)
class CollectSettings:
    """All that decides which clips a corpus gets, beside the environment and who plays.

    Attributes:
        clips: N, how many.
        clip_length: L frames.
        seed: of levels, actions and choice.
        successes: share of clips with strict success, as far as there are any; in [0, 1].
        milestones: share of clips with a milestone but without success, likewise (no effect where none are known).
        stratify: whether the shares are sought at all; otherwise clips are taken as they come.
        max_env_steps: env steps after which wanted kinds of clips are no longer waited for.
    """

    clips: int = 2000
    clip_length: int = 32
    seed: int = 0
    successes: float = 0.2
    milestones: float = 0.3
    stratify: bool = True
    max_env_steps: int = 2_000_000

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        if self.clips < 2:
            raise ValueError(f"--clips {self.clips} must be at least 2")
        if self.clip_length < 2:
            raise ValueError(f"--clip_length {self.clip_length} must be at least 2 frames")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} must not be negative")
        if self.max_env_steps < 1:
            raise ValueError(f"--max_env_steps {self.max_env_steps} must be at least 1")
        for name in ("successes", "milestones"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)} must lie in [0, 1]")
        if self.successes + self.milestones > 1:
            raise ValueError(
                f"--successes {self.successes} and --milestones {self.milestones} are more than 1 together"
            )

    def wanted(self, has_milestones: bool) -> NDArray[np.int64]:
        """Returns how many clips of each stratum are sought, ``int64[3]``."""
        success = round(self.successes * self.clips)
        milestone = round(self.milestones * self.clips) if has_milestones else 0
        return np.array([success, milestone, self.clips - success - milestone])


def collect(
    folder: Path,
    config: EnvConfig,
    make_player: MakePlayer,
    player_facts: Mapping[str, Any],
    settings: CollectSettings,
    command: str,
    progress: bool = True,
) -> Corpus:
    """Collects a corpus, or finishes one that was interrupted.

    Args:
        folder: of the corpus.
        config: the environment.
        make_player: who plays.
        player_facts: what tells this player from others, as plain types.
        settings: how many clips of which kind.
        command: noted in the manifest.
        progress: show a progress bar.

    Raises:
        ValueError: the folder holds something else or a corpus of other settings, or clips so long do not fit into
            memory.
    """
    _require_memory(config, settings)
    renderer = make_renderer(config)
    names = list(milestone_names(renderer))
    writer = CorpusWriter(
        folder,
        kind="environment",
        settings={**asdict(settings), **player_facts},
        renderer=env_facts(config),
        clip_length=settings.clip_length,
        milestones=names,
        command=command,
    )
    wanted = settings.wanted(bool(names))
    with tqdm(total=settings.clips, initial=writer.clips, unit="clip", desc="corpus", disable=not progress) as bar:
        while writer.clips < settings.clips and not writer.complete:
            number = len(writer.shards)
            clips, env_steps = play_round(config, make_player, settings, number, renderer if names else None)
            spent = sum(shard["env_steps"] for shard in writer.shards)
            seeking = settings.stratify and spent < settings.max_env_steps
            taken = np.sum([shard["strata"] for shard in writer.shards] or [np.zeros(3, np.int64)], axis=0)
            rng = np.random.default_rng([settings.seed, number])
            rows = choose(strata_of(clips), wanted, taken, seeking, rng)
            chosen = clips.select(rows)
            strata = np.bincount(strata_of(chosen), minlength=3)
            writer.append(chosen, env_steps=env_steps, strata=strata.tolist())
            bar.update(len(chosen))
            bar.set_postfix_str(f"{spent + env_steps:,} env steps, {int(taken[0] + strata[0])} successes")
    if writer.complete:
        return load_corpus(folder)
    notes = _notes(writer, wanted, settings)
    for note in notes:
        logger.warning("corpus %s: %s", folder, note)
    return writer.finish(notes)


def play_round(
    config: EnvConfig, make_player: MakePlayer, settings: CollectSettings, number: int, milestones_of: Renderer | None
) -> tuple[LabelledClips, int]:
    """Plays one round and cuts it into clips.

    Args:
        config: the environment.
        make_player: who plays.
        settings: clip length and seed.
        number: of the round.
        milestones_of: the renderer that explains snapshots to the milestones scorer; ``None``: no milestones are known.

    Returns:
        All clips that were completed, and the env steps taken.
    """
    env_seed, player_seed = np.random.SeedSequence([settings.seed, number]).generate_state(2).tolist()
    env = make_env(config, seed=env_seed)
    rows, length = config.num_envs, settings.clip_length
    steps, block = _round_length(env, settings)
    buffer = VLMReplayBuffer(rows * (block + length), batch_size=1, clip_length=length)
    assert buffer.clips is not None
    collector = ReplayCollector(
        env, _acting(make_player(env, player_seed)), frames_per_batch=rows * block, total_frames=rows * steps
    )
    parts: list[tuple[ClipBatch, NDArray[np.int64]]] = []
    succeeded: set[int] = set()
    try:
        for data in collector:
            slots = buffer.extend(data).numpy()
            reached = data["next", "success"].reshape(-1).numpy()
            succeeded.update(buffer.columns["clip_id"].numpy()[slots[reached]].tolist())
            ids = buffer.clips.take_completed()
            if ids:
                table = buffer.clips.table()
                episode = dict(zip(table["clip_id"].tolist(), table["episode_id"].tolist(), strict=True))
                parts.append((buffer.clips.batch(ids, milestones_of), np.array([episode[clip] for clip in ids])))
    finally:
        collector.shutdown()
    clip_ids = np.concatenate([batch.clip_ids for batch, _ in parts])
    clips = LabelledClips(
        lengths=np.concatenate([batch.lengths for batch, _ in parts]),
        success=np.array([clip in succeeded for clip in clip_ids.tolist()]),
        milestones=np.concatenate([_events(batch, milestones_of) for batch, _ in parts]),
        groups=number * 1_000_000 + np.concatenate([episodes for _, episodes in parts]),
        snapshots=np.concatenate([batch.snapshots for batch, _ in parts]),
    )
    return clips, rows * steps


def _round_length(env: EnvBase, settings: CollectSettings) -> tuple[int, int]:
    """Returns a round's env steps per instance, and those of a block, of which it is a multiple."""
    rows, snapshot = env.batch_size.numel(), env.observation_spec["snapshot"][0]
    affordable = ROUND_BYTES // (rows * math.prod(snapshot.shape) * snapshot.dtype.itemsize)
    plenty = CHOICE * math.ceil(settings.clips / ROUNDS) * (settings.clip_length - 1) // rows
    steps = max(min(ROUND_STEPS, affordable, max(plenty, 8 * settings.clip_length)), 2 * settings.clip_length)
    block = min(steps, 128)
    return steps - steps % block, block


def _require_memory(config: EnvConfig, settings: CollectSettings) -> None:
    """Refuses clips so long that not even a round's snapshots fit into memory.

    Raises:
        ValueError: with the numbers.
    """
    env = make_env(config)
    try:
        snapshot, (steps, _) = env.observation_spec["snapshot"][0], _round_length(env, settings)
    finally:
        env.close()
    needed, free = config.num_envs * steps * math.prod(snapshot.shape) * snapshot.dtype.itemsize, free_memory_bytes()
    if needed > free:
        raise ValueError(
            f"--clip_length {settings.clip_length} with {config.num_envs} environments takes at least "
            f"{needed / GIB:,.1f} GiB of memory, and {free / GIB:,.1f} GiB are free: choose shorter clips, or a "
            "smaller env.num_envs"
        )


def strata_of(clips: ClipLabels) -> NDArray[np.int64]:
    """Returns each clip's stratum, ``int64[N]``."""
    return np.where(clips.success, SUCCESS, np.where(clips.progress, MILESTONE, NOTHING))


def choose(
    strata: NDArray[np.int64],
    wanted: NDArray[np.int64],
    taken: NDArray[np.int64],
    seeking: bool,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Chooses what to keep of a round's clips, at random and no more than a corpus may get from one round.

    Args:
        strata: ``int64[K]``, of the round's clips.
        wanted: ``int64[3]``, clips sought per stratum.
        taken: ``int64[3]``, clips kept from earlier rounds.
        seeking: keep to the wanted shares; otherwise whatever comes fills what is missing.
        rng: chooses.

    Returns:
        ``int64[J]``, positions in the order of time.
    """
    order = rng.permutation(len(strata))
    if not seeking:
        missing = int(wanted.sum() - taken.sum())
        return np.sort(order[: min(missing, math.ceil(wanted.sum() / ROUNDS))])
    kept = []
    for stratum in range(3):
        room = min(wanted[stratum] - taken[stratum], math.ceil(wanted[stratum] / ROUNDS))
        kept.append(order[strata[order] == stratum][: max(room, 0)])
    return np.sort(np.concatenate(kept))


def _acting(player: Any) -> Any:
    def act(data: Any) -> Any:
        with torch.no_grad():
            return data.set("action", player(data))

    return act


def _events(batch: ClipBatch, milestones_of: Renderer | None) -> NDArray[np.bool_]:
    if milestones_of is None:
        return np.zeros((len(batch), 0), np.bool_)
    return MilestonesScorer().events(batch)


def _notes(writer: CorpusWriter, wanted: NDArray[np.int64], settings: CollectSettings) -> list[str]:
    """Says which kinds of clips are fewer than was asked for."""
    if not settings.stratify:
        return []
    taken = np.sum([shard["strata"] for shard in writer.shards], axis=0)
    env_steps = sum(shard["env_steps"] for shard in writer.shards)
    return [
        f"{taken[stratum]} of {wanted[stratum]} clips with {name} were found in {env_steps:,} env steps; the rest is "
        "filled with others (another --policy, or more --max_env_steps, finds more)"
        for stratum, name in enumerate(STRATA)
        if taken[stratum] < wanted[stratum]
    ]
