"""Adds up the time that a program spends in some of its methods."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def timed_parts(parts: dict[str, list[tuple[Any, str]]]) -> Iterator[dict[str, float]]:
    """Adds up the seconds spent in methods, ``name → [(class, method), …]``, while the context is open."""
    seconds: dict[str, float] = defaultdict(float)
    originals: list[tuple[Any, str, Callable[..., Any]]] = []

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start

        return timed

    for name, methods in parts.items():
        for owner, attribute in methods:
            method = getattr(owner, attribute)
            originals.append((owner, attribute, method))
            setattr(owner, attribute, wrap(name, method))
    try:
        yield seconds
    finally:
        for owner, attribute, method in originals:
            setattr(owner, attribute, method)
