"""The buffer's whole state as nested dicts of tensors and plain values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDict

from vlmrb.replay.transform import STAMP

if TYPE_CHECKING:
    from vlmrb.replay.buffer import VLMReplayBuffer

SCHEMA = 2
_KEYS = frozenset(
    ("schema", "settings", "env_steps", "size", "rows", "writer", "columns", "sampler", "known", "terms", "clips")
    + ("streams", "look_back", "monitor", "written", "stale", "generator")
)


def buffer_state(buffer: VLMReplayBuffer) -> dict[str, Any]:
    """Returns everything that later draws depend on; loadable by ``torch.load(…, weights_only=True)``."""
    size = len(buffer)
    table = buffer._writer.table
    return {
        "schema": SCHEMA,
        "settings": _settings(buffer),
        "env_steps": buffer.env_steps,
        "size": size,
        "rows": {} if table is None else table.first(size).to_dict(),
        "writer": buffer._writer.state_dict(),
        "sampler": buffer._sampler.state_dict(),
        "clips": None if buffer.clips is None else buffer.clips.state_dict(),
        "streams": buffer._stamper.get_extra_state(),
        "look_back": None if buffer._n_step is None else buffer._n_step.get_extra_state(),
        "monitor": buffer.monitor.state_dict(),
        "generator": buffer._rng.get_state(),
        "selector": None if buffer.selector is None else buffer.selector.state_dict(),
        "hindsight": None if buffer.hindsight is None else buffer.hindsight.get_extra_state(),
        "score_reward": None if buffer.score_reward is None else buffer.score_reward.get_extra_state(),
        **buffer._priorities.state_dict(size),  # columns, known, terms, written, stale
    }


def load_buffer_state(buffer: VLMReplayBuffer, state: Mapping[str, Any]) -> None:
    """Restores `buffer_state` into a buffer with the same settings; it continues exactly as the saved one would have.

    Raises:
        ValueError: another schema, or other settings; nothing has changed.
    """
    check_buffer_state(buffer, state)
    buffer.empty()
    _write_rows(buffer, state)
    buffer._sampler.load_state_dict(state["sampler"])
    buffer._priorities.load_state_dict(state)
    if buffer.clips is not None:
        buffer.clips.load_state_dict(state["clips"])
    buffer._stamper.set_extra_state(state["streams"])
    _expect_same_rows(buffer, state)
    if buffer._n_step is not None:
        buffer._n_step.set_extra_state(state["look_back"])
    buffer.monitor.load_state_dict(state["monitor"])
    if buffer.selector is not None:
        buffer.selector.load_state_dict(state["selector"])
    if buffer.hindsight is not None:
        buffer.hindsight.set_extra_state(state["hindsight"])
    if buffer.score_reward is not None and state.get("score_reward") is not None:  # not kept by earlier versions
        buffer.score_reward.set_extra_state(state["score_reward"])
    buffer.env_steps = state["env_steps"]
    buffer._rng.set_state(state["generator"])


def restore_rows(buffer: VLMReplayBuffer, state: Mapping[str, Any]) -> None:
    """Restores rows, clips and episodes of `buffer_state`, and nothing that later draws depend on.

    Rows are as new at env step 0: unscored, with the |δ| of new ones. The saved buffer may have had other priority
    terms.

    Raises:
        ValueError: another schema, or other settings; nothing has changed.
    """
    ours, saved = _settings(buffer), {**state.get("settings", {})}
    left_open = {"terms", "selector", "score_reward", "hindsight"}
    if buffer.clips is None:  # clips can be left, but not made
        left_open |= {"clip_length"}
    for name in (name for name in ours if name in saved and name not in left_open):
        if saved[name] != ours[name]:
            setting = "training.gamma" if name == "gamma" else f"replay.{name}"
            raise ValueError(f"its buffer was filled with {setting}={saved[name]}, and this run has {ours[name]}")
    if buffer.hindsight is not None and state.get("hindsight") is None:
        raise ValueError(
            "its buffer was filled without replay.her and does not tell which rows follow each other: set replay.her "
            "to null, or fill from recorded episodes"
        )
    check_buffer_state(buffer, {**state, "settings": ours})
    buffer.empty()
    _write_rows(buffer, state)
    if buffer.clips is not None:
        buffer.clips.load_state_dict(state["clips"])
    buffer._stamper.set_extra_state(state["streams"])
    _expect_same_rows(buffer, state)
    if buffer._n_step is not None:
        buffer._n_step.set_extra_state(state["look_back"])
    if buffer.hindsight is not None:
        buffer.hindsight.index.load_state_dict(state["hindsight"]["index"])
    index = np.arange(state["size"])
    if len(index):
        columns = {name: tensor.numpy() for name, tensor in state["columns"].items()}
        names = ("episode_id", "episode_success") + (("clip_id", "position") if buffer.clips is not None else ())
        known = {name: columns[name] for name in names} | {"env_step": 0}
        buffer._priorities.fill(index, buffer._priorities.values_of(TensorDict(state["rows"], [len(index)])) | known)
        buffer._priorities.compose(index, source="an earlier run's rows")


def _write_rows(buffer: VLMReplayBuffer, state: Mapping[str, Any]) -> None:
    if state["size"]:
        rows = TensorDict(state["rows"], [state["size"]])
        if buffer._writer.table is None:
            buffer._choose_storage(rows)
        buffer._writer.extend(rows)
    buffer._writer.load_state_dict(state["writer"])


def check_buffer_state(buffer: VLMReplayBuffer, state: Mapping[str, Any]) -> None:
    """Refuses a state that does not fit.

    Raises:
        ValueError: one line that says what differs and what to do.
    """
    schema = state.get("schema") if isinstance(state, Mapping) else None
    if schema != SCHEMA:
        older = isinstance(schema, int) and schema < SCHEMA
        advice = (
            "resume with the version that saved it, or start without it"
            if older
            else "was it saved by a newer version?"
        )
        raise ValueError(f"saved replay buffer has schema {schema}, this version reads schema {SCHEMA}: {advice}")
    missing = sorted(_KEYS - state.keys())
    if missing:
        raise ValueError(f"saved replay buffer is incomplete, it lacks {missing}: resume from another checkpoint")
    ours = _settings(buffer)
    for name in state["settings"] | ours:
        saved, own = state["settings"].get(name), ours.get(name)
        if saved != own:
            raise ValueError(
                f"saved replay buffer has {name}={saved}, this one {name}={own}: resume with the saved one"
            )
    size = state["size"]
    if size and buffer._storage.initialized:
        saved_rows = {
            key: (leaf.dtype, leaf.shape[1:]) for key, leaf in TensorDict(state["rows"], [size]).items(True, True)
        }
        our_rows = {key: (leaf.dtype, leaf.shape[1:]) for key, leaf in buffer._storage._storage.items(True, True)}
        if saved_rows != our_rows:
            raise ValueError(
                "saved replay buffer holds rows of other keys, shapes or dtypes: was it another environment?"
            )


def _expect_same_rows(buffer: VLMReplayBuffer, state: Mapping[str, Any]) -> None:
    """Lets the next block be checked against the rows that were saved."""
    if state["size"]:
        rows = TensorDict(state["rows"], [state["size"]])
    elif state["look_back"] is not None:
        rows = TensorDict(state["look_back"]["rows"], state["look_back"]["shape"])
    else:
        return  # no block has come yet
    made_here = (STAMP, "steps_to_next_obs")
    leaves = [(key, leaf) for key, leaf in rows.items(True, True) if key not in made_here]
    snapshots = None if state["clips"] is None else state["clips"]["arrays"].get("snapshots")
    buffer._stamper.reader.expect(leaves, rows.batch_dims, snapshots)


def _settings(buffer: VLMReplayBuffer) -> dict[str, Any]:
    return {
        "capacity": buffer.capacity,
        "clip_length": None if buffer.clips is None else buffer.clips.clip_length,
        "n_steps": buffer.n_steps,
        "gamma": None if buffer._n_step is None else buffer._n_step.gamma,
        "terms": [repr(term) for term in buffer.terms],
        "selector": None if buffer.selector is None else repr(buffer.selector),
        "score_reward": None if buffer.score_reward is None else repr(buffer.score_reward),
        "hindsight": None if buffer.hindsight is None else repr(buffer.hindsight),
    }
