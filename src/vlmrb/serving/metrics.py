"""Counters of a scoring server in Prometheus' text format."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Metrics:
    """What a server has done since it started; used from one thread."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()  # by status
        self.clips = 0
        self.bytes_received = 0
        self.in_flight = 0
        self._seconds = 0.0
        self._buckets = [0] * (len(BUCKETS_S) + 1)

    def answered(self, status: int, clips: int, size: int, seconds: float) -> None:
        """Counts one request for scores.

        Args:
            status: of the answer.
            clips: in the request; counted as scored if the status is 200.
            size: bytes of its body.
            seconds: from its head to its answer.
        """
        self.requests[status] += 1
        self.clips += clips if status == 200 else 0
        self.bytes_received += size
        self._seconds += seconds
        self._buckets[bisect.bisect_left(BUCKETS_S, seconds)] += 1

    def text(self, workers: int, ready: int) -> str:
        """Returns the page that Prometheus reads.

        Args:
            workers: that there should be.
            ready: that can take clips.
        """
        lines = ["# TYPE vlmrb_requests_total counter"]
        lines += [f'vlmrb_requests_total{{status="{status}"}} {self.requests[status]}' for status in self.requests]
        errors = sum(count for status, count in self.requests.items() if status != 200)
        for name, kind, value in (
            ("errors_total", "counter", errors),
            ("clips_total", "counter", self.clips),
            ("received_bytes_total", "counter", self.bytes_received),
            ("requests_in_flight", "gauge", self.in_flight),
            ("workers", "gauge", workers),
            ("workers_ready", "gauge", ready),
        ):
            lines += [f"# TYPE vlmrb_{name} {kind}", f"vlmrb_{name} {value}"]
        lines.append("# TYPE vlmrb_request_seconds histogram")
        total = 0
        for bound, count in zip((*BUCKETS_S, float("inf")), self._buckets, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(f'vlmrb_request_seconds_bucket{{le="{label}"}} {total}')
        lines += [f"vlmrb_request_seconds_sum {self._seconds:.6f}", f"vlmrb_request_seconds_count {total}", ""]
        return "\n".join(lines)


class Metered:
    """ASGI middleware: counts requests for scores, and answers 504 to one that takes too long.

    A request whose worker dies before it has said that it took it would otherwise never be answered.

    Args:
        app: the application.
        metrics: where to count.
        path: of the requests that count.
        timeout_s: seconds a request may take.
    """

    def __init__(self, app: Any, metrics: Metrics, path: str, timeout_s: float) -> None:
        self._app = app
        self._metrics = metrics
        self._path = path
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or scope["path"] != self._path:
            await self._app(scope, receive, send)
            return
        status = 0
        began = time.monotonic()
        state = scope.setdefault("state", {})

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.in_flight += 1
        try:
            await asyncio.wait_for(self._app(scope, receive, noting), self._timeout_s)
        except TimeoutError:
            if not status:
                await noting({"type": "http.response.start", "status": 504, "headers": []})
                text = f"not scored within {self._timeout_s:g} s"
                await send({"type": "http.response.body", "body": text.encode()})
        except Exception:
            status = status or 500  # what the layer above us makes of it
            raise
        finally:
            self._metrics.in_flight -= 1
            size, clips = state.get("bytes", 0), state.get("clips", 0)
            self._metrics.answered(status or 499, clips, size, time.monotonic() - began)
