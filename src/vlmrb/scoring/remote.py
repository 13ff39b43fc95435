"""A scorer that runs elsewhere, behind `vlmrb serve`: clips go out packed, scores come back."""

from __future__ import annotations

import json
import logging
import time
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Needs, Scorer, ScorerError
from vlmrb.serving.client import Client, RemoteError
from vlmrb.serving.wire import MEDIA_TYPE, SCHEMA, Identity, WireError, pack, read_answer

logger = logging.getLogger(__name__)


class RemoteScorer(Scorer):
    """Has clips scored by a server (`vlmrb serve`), or by several equal ones.

    Name, version, prompt, needs and frame size are those of the scorer behind the server, so a score cache holds
    wherever that scorer runs. They are asked for once, when the first of them is looked at: as a training run starts,
    which waits for a server or is refused, in one line, as ``wait_s`` says. From then on only this very scorer's
    answers are taken; a server that comes back with another one is left alone.

    This side renders the clips and sends each distinct frame of a batch once.

    Args:
        urls: addresses of the servers, ``http://host:port`` or ``https://…``. They take turns, and stand in for each
            other.
        api_key_env: environment variable with the servers' API key; if it is not set, none is sent.
        scorer_name: what the scorer must be called; ``None`` takes what the server has.
        scorer_version: its version; ``None`` takes what the server has.
        wait_s: seconds to wait for a server when the run starts, and when the scoring process starts again; 0 refuses
            at once. Keep it below ``scoring.startup_timeout_s``.
        deadline_s: seconds after which a batch counts as failed, all attempts included. Keep it below
            ``scoring.timeout_s``. Higher → outlasts longer breaks of a server, costs fewer clips.
        timeout_s: seconds one attempt may take. Higher → patience with a slow server, later fail-over from a hung one.
        backoff_s: seconds of the first pause before asking again; see `Client`.
        breaker_failures: failures in a row after which a server is left alone for a while.
        breaker_s: seconds for which it is.
        ca_file: certificates to trust instead of the system's, for https with a private authority.

    Raises:
        ValueError: a setting cannot work.
        ScorerError: from the first look at its name: no server in time, or another scorer than expected.
    """

    def __init__(
        self,
        urls: str | list[str],
        api_key_env: str = "VLMRB_API_KEY",
        scorer_name: str | None = None,
        scorer_version: str | None = None,
        wait_s: float = 300.0,
        deadline_s: float = 100.0,
        timeout_s: float = 60.0,
        backoff_s: float = 0.5,
        breaker_failures: int = 3,
        breaker_s: float = 10.0,
        ca_file: str | None = None,
    ) -> None:
        if find_spec("urllib3") is None:
            raise ValueError("the remote scorer needs urllib3: pip install 'vlmrb[remote]'")
        for name, value, least in (("wait_s", wait_s, 0), ("deadline_s", deadline_s, timeout_s)):
            if not value >= least:
                raise ValueError(f"remote scorer: {name}={value} must be at least {least:g}")
        self._client = Client(
            urls,
            api_key_env,
            timeout_s=timeout_s,
            backoff_s=backoff_s,
            breaker_failures=breaker_failures,
            breaker_s=breaker_s,
            ca_file=ca_file,
        )
        self._pinned = scorer_name, scorer_version
        self._wait_s = wait_s
        self._deadline_s = deadline_s
        self._identity: Identity | None = None
        self._max_bytes = 0
        self._served_stats: dict[str, float] = {}

    @property
    def name(self) -> str:  # type: ignore[override]
        """The served scorer's."""
        return self._known().name

    @property
    def version(self) -> str:  # type: ignore[override]
        """The served scorer's."""
        return self._known().version

    @property
    def prompt(self) -> str:
        """The served scorer's, empty if it has none."""
        return self._known().prompt

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """What the served scorer reads off its clips, and so what is sent."""
        return self._known().needs

    @property
    def frame_size(self) -> int | None:  # type: ignore[override]
        """The served scorer's."""
        return self._known().frame_size

    @property
    def every_frame(self) -> bool:  # type: ignore[override]
        """The served scorer's."""
        return self._known().every_frame

    def setup(self) -> None:
        """Waits for a server and makes sure that it still has the scorer that the run began with.

        Raises:
            RemoteError: no server in time, or another scorer; like any failure, it may be gone at the next try.
        """
        known, (identity, self._max_bytes) = self._known(), self._ask()
        if identity != known:
            raise RemoteError(f"the servers' scorer has become {identity}; this run began with {known}")

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Sends clips, in two halves if they are more than a server takes at a time.

        Args:
            clips: B clips.

        Returns:
            ``float32[B]`` in [0, 1].

        Raises:
            RemoteError: no usable answer within ``deadline_s``.
        """
        return self._score(clips, time.monotonic() + self._deadline_s)

    def _score(self, clips: ClipBatch, deadline: float) -> NDArray[np.float32]:
        identity = self._known()
        message = pack(clips, identity)
        if len(message) > self._max_bytes and len(clips) > 1:
            halves = np.array_split(np.arange(len(clips)), 2)
            return np.concatenate([self._score(clips.select(rows), deadline) for rows in halves])
        scores, self._served_stats = self._client.ask(
            "/score",
            lambda content: read_answer(content, identity, len(clips)),
            body=message,
            content_type=MEDIA_TYPE,
            deadline_s=max(0.0, deadline - time.monotonic()),
        )
        return scores

    def close(self) -> None:
        """Closes connections."""
        self._client.close()

    def stats(self) -> dict[str, float]:
        """Returns what the served scorer reports about itself, and how the servers are doing.

        The latter: ``requests``, ``failed_requests`` and ``sent_mb`` so far, and ``servers_resting`` at present.
        """
        client = self._client
        return {
            **self._served_stats,
            "requests": float(client.attempts),
            "failed_requests": float(client.failures),
            "sent_mb": client.bytes_sent / 2**20,
            "servers_resting": float(client.resting),
        }

    def _known(self) -> Identity:
        if self._identity is None:
            try:
                identity, self._max_bytes = self._ask()
            except RemoteError as error:
                raise ScorerError(
                    f"no scoring server is there ({error}): start one with `vlmrb serve -c configs/scorer/….yaml`, "
                    "correct the scorer's urls, or let its wait_s be longer"
                ) from error
            for what, wanted in zip(("name", "version"), self._pinned, strict=True):
                found = getattr(identity, what)
                if wanted not in (None, found):
                    where = ", ".join(self._client.urls)
                    raise ScorerError(f"{where}: the scorer's {what} is {found!r}, but scorer_{what} wants {wanted!r}")
            self._identity = identity
        return self._identity

    def _ask(self) -> tuple[Identity, int]:
        """Returns who scores, and how many bytes a request may have."""
        logger.info("asking %s who scores; waiting up to %g s", ", ".join(self._client.urls), self._wait_s)
        return self._client.ask("/info", _read_info, deadline_s=self._wait_s, patient=False)


def _read_info(content: bytes) -> tuple[Identity, int]:
    """Reads a server's /info.

    Raises:
        WireError: this is none, or of another schema.
    """
    try:
        found = json.loads(content)
    except ValueError as error:
        raise WireError(f"this is no scoring server (its /info is {content[:60]!r})") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise WireError(f"its /info is of schema {schema!r}, not {SCHEMA}: use one version of vlmrb on both sides")
    max_bytes = found.get("max_request_bytes")
    if not isinstance(max_bytes, int):
        raise WireError("its /info tells no max_request_bytes")
    return Identity.from_json(found.get("scorer")), max_bytes
