"""The states of all random generators as plain containers (``weights_only``-safe), for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Returns the states of torch's and NumPy's global generators and of a run's own ones."""
    algorithm, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "generators": {name: generator.get_state() for name, generator in generators.items()},
    }


def restore_random_states(states: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """Restores `random_states`; what was saved on another kind of device stays as it is now."""
    torch.set_rng_state(states["torch"])
    algorithm, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    for name, generator in generators.items():
        state = states["generators"].get(name)
        if state is not None and state.shape == generator.get_state().shape:
            generator.set_state(state)
