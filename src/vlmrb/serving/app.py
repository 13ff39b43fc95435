"""The LitServe application behind `vlmrb serve`; imported only by the process that serves."""

import hmac
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Annotated, Any

import litserve as ls
import numpy as np
from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from litserve.connector import check_cuda_with_nvidia_smi
from litserve.loops.simple_loops import BatchedLoop
from litserve.utils import LitAPIStatus, LoopResponseType, WorkerSetupStatus

from vlmrb.scoring.backends import describe
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer
from vlmrb.serving.batching import score_requests
from vlmrb.serving.metrics import Metered, Metrics
from vlmrb.serving.wire import SCHEMA, Identity, WireError, read_header, unpack

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.1  # a worker that dies while it waits takes a request with it for at most this long
OPEN_PATHS = ("/", "/health")  # a load balancer has no key


@dataclass(frozen=True)
class Limits:
    """What one request may take.

    Attributes:
        request_bytes: as sent.
        raw_bytes: once unpacked.
        timeout_s: seconds until it is answered.
    """

    request_bytes: int
    raw_bytes: int
    timeout_s: float


@dataclass
class Front:
    """What the side that talks HTTP knows: in the application's state, since LitServe's classes travel to workers."""

    key: str | None
    limits: Limits
    info_file: Path
    batch_clips: int
    workers: int
    metrics: Metrics = field(default_factory=Metrics)
    _identity: Identity | None = None

    @property
    def identity(self) -> Identity:
        """The scorer as its first worker found it once set up.

        Raises:
            HTTPException: 503, no worker has got that far.
        """
        if self._identity is None:
            if not self.info_file.exists():
                raise HTTPException(503, "no worker has loaded the scorer yet")
            self._identity = Identity.from_json(json.loads(self.info_file.read_text()))
        return self._identity

    def info(self) -> dict[str, Any]:
        """Returns what a client needs to know."""
        return {
            "schema": SCHEMA,
            "scorer": vars(self.identity),
            "max_request_bytes": self.limits.request_bytes,
            "batch_clips": self.batch_clips,
            "workers": self.workers,
        }


async def admitted(request: Request) -> bytes:
    """Reads a request's body, as far as it is allowed and meant for this scorer.

    Raises:
        HTTPException: 400, 409 or 413 with the reason in one line.
    """
    front: Front = request.app.state.front
    limit = front.limits.request_bytes
    too_large = HTTPException(413, f"requests may have {limit} bytes: send fewer clips, or raise --max_request_mb")
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    try:
        header, _ = read_header(bytes(body[: 1 << 21]))
    except WireError as error:
        raise HTTPException(400, str(error)) from error
    if header.raw_bytes > front.limits.raw_bytes:
        raise HTTPException(413, f"clips may unpack to {front.limits.raw_bytes} bytes: send fewer")
    if header.identity != front.identity:
        raise HTTPException(409, f"here scores {front.identity}, the request is for {header.identity}")
    request.state.bytes, request.state.clips = len(body), header.clips
    return bytes(body)


class WaitingLoop(BatchedLoop):
    """Gathers requests like LitServe's own loop, but sleeps while there are none instead of looking all the time."""

    def get_batch_requests(self, lit_api: ls.LitAPI, request_queue: Queue, transport: Any) -> tuple[list, list]:
        """Returns requests to score together, and those that waited too long.

        No more than fill a batch of the scorer: the rest is for other workers.
        """
        requests: list[tuple] = []
        late: list[tuple] = []
        clips, ends = 0, None
        while clips < lit_api.max_batch_size:
            left = IDLE_WAIT_S if ends is None else ends - time.monotonic()
            found = self.get_request(request_queue, timeout=left) if left > 0 else None
            if found is None:
                break
            ends = ends or time.monotonic() + lit_api.batch_timeout
            consumer, uid, arrived, content = found
            kind = LoopResponseType.REGULAR
            self.put_response(transport, consumer, uid, (), LitAPIStatus.START, kind)
            waited = time.monotonic() - arrived
            if lit_api.request_timeout and waited > lit_api.request_timeout:
                late.append((consumer, uid))
            else:
                requests.append((consumer, uid, content))
                clips += read_header(content)[0].clips
        return requests, late


class ScorerAPI(ls.LitAPI):
    """One scorer in each worker."""

    def __init__(self, scorer: Scorer, batch_clips: int, limits: Limits, info_file: Path, **settings: Any) -> None:
        super().__init__(api_path="/score", loop=WaitingLoop(), **settings)
        self.scorer = scorer
        self.batch_clips = batch_clips
        self.limits = limits
        self.info_file = info_file

    def authorize(self, request: Request) -> None:
        """Lets nobody in without the key.

        Raises:
            HTTPException: 401.
        """
        key = request.app.state.front.key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is None or request.url.path in OPEN_PATHS:
            return
        if not hmac.compare_digest(given.encode(), key.encode()):  # takes as long for a nearly right key
            raise HTTPException(401, "wrong or missing API key: send Authorization: Bearer …")

    def setup(self, device: str) -> None:
        """Loads the scorer in a worker, which sees its own GPU only."""
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        if device.startswith("cuda:"):
            os.environ["CUDA_VISIBLE_DEVICES"] = _visible(int(device.removeprefix("cuda:")))
        try:
            self.scorer.setup()
        except Exception as error:
            logger.error("scorer %r cannot be set up: %s", self.scorer.name, describe(error))
            raise
        found = identity_of(self.scorer)
        part = self.info_file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(vars(found)))
        part.rename(self.info_file)
        logger.info("scorer %s is ready on %s (process %d)", found, device, os.getpid())

    def decode_request(self, request: Annotated[bytes, Depends(admitted)]) -> ClipBatch | WireError:
        """Unpacks clips; a damaged body becomes the answer to its own request only."""
        try:
            return unpack(request, self.limits.raw_bytes)[1]
        except WireError as error:
            return error

    def batch(self, inputs: list) -> list:
        """Leaves requests as they are."""
        return inputs

    def predict(self, x: Sequence[ClipBatch | WireError]) -> list[Any]:
        """Scores requests together."""
        sound = [number for number, clips in enumerate(x) if isinstance(clips, ClipBatch)]
        answers: list[Any] = list(x)
        found = score_requests(self.scorer, [x[number] for number in sound], self.batch_clips)  # type: ignore[misc]
        for number, scores in zip(sound, found, strict=True):
            answers[number] = scores
        return answers

    def unbatch(self, output: list) -> list:
        """Leaves answers as they are."""
        return output

    def encode_response(self, output):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201 — LitServe reads annotations
        """Makes JSON of scores, and one line of an error."""
        if isinstance(output, WireError):
            return JSONResponse({"detail": str(output)}, 400)
        if isinstance(output, Exception):
            logger.error("scorer %r raised %s", self.scorer.name, describe(output), exc_info=output)
            return JSONResponse({"detail": f"the scorer raised {describe(output)}"}, 500)
        scores = np.asarray(output, np.float32).tolist()
        stats = {name: value for name, value in self.scorer.stats().items() if math.isfinite(value)}
        return {"schema": SCHEMA, "scorer": vars(identity_of(self.scorer)), "scores": scores, "stats": stats}


class _Server(ls.LitServer):
    """Ends if its address is gone by the time that it is listened to; LitServe would find out in a thread of its own.

    Two servers that load at the same time may both be bound to it.
    """

    def _start_server(self, port: int, count: int, log_level: str, sockets: list[Any], *rest: Any, **more: Any) -> Any:
        try:
            for bound in sockets:
                bound.listen()
        except OSError as error:
            reason = f"port={port} was taken while the scorer was loaded ({error.strerror}): choose another"
            raise ValueError(reason) from error
        return super()._start_server(port, count, log_level, sockets, *rest, **more)


class _SnapshotDict(dict):
    """Requests under way: LitServe's monitor walks through them while another thread adds some."""

    def items(self):  # type: ignore[no-untyped-def]
        return list(super().items())


def make_server(
    scorer: Scorer,
    *,
    key: str | None,
    limits: Limits,
    info_file: Path,
    batch_clips: int,
    batch_wait_s: float,
    accelerator: str,
    devices: int | list[int] | str,
    workers_per_device: int,
) -> ls.LitServer:
    """Builds the application around a scorer that has not been set up.

    Args:
        scorer: must be picklable.
        key: API key, ``None`` lets everybody in.
        limits: of a request.
        info_file: where workers say what they have loaded; must not exist.
        batch_clips: most clips in one call of the scorer.
        batch_wait_s: seconds to wait for further requests to score together.
        accelerator: ``cpu``, ``cuda`` or ``auto``.
        devices: how many or which.
        workers_per_device: processes on each.
    """
    api = ScorerAPI(
        scorer, batch_clips, limits, info_file, max_batch_size=max(2, batch_clips), batch_timeout=batch_wait_s
    )
    metrics = Metrics()
    if accelerator == "auto":  # LitServe's own choice loads torch to find out
        accelerator = "cuda" if check_cuda_with_nvidia_smi() else "cpu"
    server = _Server(
        api,
        accelerator=accelerator,
        devices=devices,
        workers_per_device=workers_per_device,
        timeout=limits.timeout_s,
        healthcheck_path="/ready",
        info_path="/server",
        disable_openapi_url=True,
        middlewares=[(Metered, {"metrics": metrics, "path": "/score", "timeout_s": limits.timeout_s})],
        restart_workers=True,
    )
    server.response_buffer = _SnapshotDict()
    workers = len(server.devices) * workers_per_device
    front = Front(key, limits, info_file, batch_clips, workers, metrics)
    server.app.state.front = front
    allowed = [Depends(server.setup_auth())]

    def ready() -> int:
        return sum(status == WorkerSetupStatus.READY for status in server.workers_setup_status.values())

    def health() -> JSONResponse:
        count = ready()
        return JSONResponse({"ready": count, "workers": workers}, 200 if count else 503)

    def page() -> PlainTextResponse:
        return PlainTextResponse(metrics.text(workers, ready()))

    server.app.add_api_route("/health", health, methods=["GET"])
    server.app.add_api_route("/info", front.info, methods=["GET"], dependencies=allowed)
    server.app.add_api_route("/metrics", page, methods=["GET"], dependencies=allowed)
    return server


def identity_of(scorer: Scorer) -> Identity:
    """Returns what identifies a scorer's answers."""
    prompt = getattr(scorer, "prompt", "")
    return Identity(scorer.name, scorer.version, str(prompt), scorer.needs, scorer.frame_size, scorer.every_frame)


def _visible(number: int) -> str:
    """Returns the name of a GPU among those that this server was given."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[number] if number < len(names) else str(number)
