"""What travels between the `remote` scorer and `vlmrb serve`: clips one way, scores back; no pickle, no compiler.

A request is ``magic (8 bytes) | header size (uint32, little-endian) | header (JSON) | body (zlib)``. The body holds the
distinct rows of the clips, each once, and then ``index``: which row each frame of each clip is. A row is what the
scorer asks for: a rendered frame, a snapshot or an observation. Answers are plain JSON.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.scorer import Needs

SCHEMA = 1
MAGIC = b"VLMRBCLP"
MEDIA_TYPE = "application/octet-stream"
MAX_HEADER_BYTES = 1 << 20
_PREFIX = struct.Struct("<8sI")
_INDEX = np.dtype("<i4")
_KINDS = "biuf"  # of dtypes that are taken: plain numbers only


class WireError(ValueError):
    """A message is not what it should be."""


@dataclass(frozen=True)
class Identity:
    """Who scores, as far as the wire and the score cache are concerned.

    Attributes:
        name: the scorer's.
        version: the scorer's.
        prompt: text of the scorer's prompt attribute, empty if it has none.
        needs: what a row is.
        frame_size: upper bound of frames in pixels; ``None`` is the environment's default.
        every_frame: whether clips must not be thinned for the scorer.
    """

    name: str
    version: str
    prompt: str
    needs: Needs
    frame_size: int | None
    every_frame: bool = False

    @classmethod
    def from_json(cls, found: Any) -> Identity:
        """Reads what `vars` gives back from JSON.

        Raises:
            WireError: a field is missing or of another kind.
        """
        if not isinstance(found, Mapping):
            raise WireError("no description of a scorer")
        size, every_frame = found.get("frame_size"), found.get("every_frame", False)
        if found.get("needs") not in ("frames", "snapshots", "observations") or not isinstance(size, int | None):
            raise WireError("a description of a scorer without proper needs and frame_size")
        if not isinstance(every_frame, bool):
            raise WireError("a description of a scorer without a proper every_frame")
        for field in ("name", "version", "prompt"):
            if not isinstance(found.get(field), str):
                raise WireError(f"a description of a scorer without a proper {field}")
        return cls(found["name"], found["version"], found["prompt"], found["needs"], size, every_frame)

    def __str__(self) -> str:
        """Returns name and version, and the frame size if one is asked for."""
        size = f" at {self.frame_size} px" if self.frame_size is not None else ""
        return f"{self.name!r} version {self.version!r}{size}"


@dataclass(frozen=True)
class Header:
    """What is said about the clips of one request.

    Attributes:
        identity: who is expected to score them.
        clips: B.
        length: L, frames of a clip.
        lengths: real frames of each clip, 2 to L.
        dtype: of the rows.
        shape: ``[U, …]`` of the rows.
    """

    identity: Identity
    clips: int
    length: int
    lengths: tuple[int, ...]
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def raw_bytes(self) -> int:
        """Size of the body once unpacked."""
        return self.dtype.itemsize * math.prod(self.shape) + _INDEX.itemsize * self.clips * self.length


class SentRows:
    """Hands out the rows that came over the wire, for clips whose snapshots are row numbers ``int32[B, L, 1]``.

    Args:
        rows: ``[U, …]``, frames or observations.
        frame_size: what the frames were drawn for.
    """

    name = "sent"

    def __init__(self, rows: NDArray, frame_size: int | None) -> None:
        self.rows = rows
        self.frame_size = frame_size

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        """Returns frames ``uint8[..., H, W, 3]``.

        Raises:
            ValueError: the scorer asks for another size than it said it would.
        """
        if frame_size != self.frame_size:
            raise ValueError(f"frames were sent for frame_size={self.frame_size}, the scorer wants {frame_size}")
        return self.rows[snapshots[..., 0]]

    def observe(self, snapshots: NDArray) -> NDArray:
        """Returns observations ``[..., *observation_shape]``."""
        return self.rows[snapshots[..., 0]]


def pack(clips: ClipBatch, identity: Identity) -> bytes:
    """Packs clips into a request.

    Args:
        clips: B clips; with a renderer, unless the scorer needs snapshots.
        identity: who is expected to score them.

    Raises:
        ValueError: the clips carry no renderer, and the scorer needs one.
    """
    flat = clips.snapshots.reshape(-1, *clips.snapshots.shape[2:])
    rows, index = _distinct(flat)
    if identity.needs != "snapshots":
        rows, drawn = _distinct(_drawn(rows, clips.renderer, identity))  # what is not drawn may differ in a snapshot
        index = drawn[index]
    rows = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<"))
    header = {
        "schema": SCHEMA,
        "scorer": vars(identity),
        "clips": len(clips),
        "length": clips.snapshots.shape[1],
        "lengths": clips.lengths.tolist(),
        "dtype": rows.dtype.str,
        "shape": rows.shape,
    }
    encoded = json.dumps(header).encode()
    packer = zlib.compressobj(1)
    body = packer.compress(rows.data) + packer.compress(index.astype(_INDEX).data) + packer.flush()
    return _PREFIX.pack(MAGIC, len(encoded)) + encoded + body


def read_header(message: bytes) -> tuple[Header, int]:
    """Reads a request's header and checks all that can be checked without unpacking.

    Returns:
        The header, and where the body begins.

    Raises:
        WireError: this is no request of this schema, or it contradicts itself.
    """
    if len(message) < _PREFIX.size or message[: len(MAGIC)] != MAGIC:
        raise WireError("this is no request of vlmrb's remote scorer")
    size = _PREFIX.unpack_from(message)[1]
    if size > MAX_HEADER_BYTES or len(message) < _PREFIX.size + size:
        raise WireError("the header is cut short or too long")
    try:
        found = json.loads(message[_PREFIX.size : _PREFIX.size + size])
    except ValueError as error:
        raise WireError(f"the header is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise WireError(f"the request is of schema {schema!r}, this side speaks {SCHEMA}: use one version of vlmrb")
    return _checked(found), _PREFIX.size + size


def unpack(message: bytes, max_raw_bytes: int) -> tuple[Header, ClipBatch]:
    """Rebuilds the clips of a request.

    Args:
        message: what `pack` made.
        max_raw_bytes: most bytes the body may take once unpacked.

    Raises:
        WireError: the message is damaged, or larger than allowed.
    """
    header, start = read_header(message)
    if header.raw_bytes > max_raw_bytes:
        raise WireError(f"the clips unpack to {header.raw_bytes} bytes; at most {max_raw_bytes} are taken")
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(message[start:], header.raw_bytes + 1)
    except zlib.error as error:
        raise WireError(f"the body is damaged: {error}") from error
    if len(raw) != header.raw_bytes or not unpacker.eof:
        raise WireError("the body is not of the size that its header tells")
    rows_bytes = header.dtype.itemsize * math.prod(header.shape)
    rows = np.frombuffer(raw, header.dtype, math.prod(header.shape)).reshape(header.shape)
    index = np.frombuffer(raw, _INDEX, offset=rows_bytes).reshape(header.clips, header.length)
    if index.min() < 0 or index.max() >= len(rows):
        raise WireError("a frame refers to a row that was not sent")
    ids, lengths = np.arange(header.clips), np.array(header.lengths, np.int64)
    if header.identity.needs == "snapshots":
        return header, ClipBatch(ids, rows[index], lengths)
    return header, ClipBatch(ids, index[..., None], lengths, SentRows(rows, header.identity.frame_size))


def read_answer(content: bytes, identity: Identity, count: int) -> tuple[NDArray[np.float32], dict[str, float]]:
    """Reads the scores in an answer.

    Args:
        content: JSON ``{"schema", "scorer", "scores", "stats"}``.
        identity: who was asked.
        count: B, the clips sent.

    Returns:
        ``float32[B]`` in [0, 1], and what the scorer reports about itself, as far as it consists of numbers.

    Raises:
        WireError: the answer is of another schema or scorer, or holds something else than B numbers in [0, 1].
    """
    try:
        found = json.loads(content)
    except ValueError as error:
        raise WireError(f"the answer is no JSON ({content[:60]!r}…)") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise WireError(f"the answer is none of schema {SCHEMA} ({content[:60]!r}…)")
    other = Identity.from_json(found.get("scorer"))
    if other != identity:
        raise WireError(f"the answer is by scorer {other}, not {identity}")
    try:
        scores = np.array(found.get("scores"), dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise WireError("the answer's scores are no numbers") from error
    if scores.shape != (count,) or not ((scores >= 0) & (scores <= 1)).all():  # so that NaN is refused, too
        raise WireError(f"the answer holds no {count} scores in [0, 1]")
    stats = found.get("stats")
    reported = stats.items() if isinstance(stats, dict) else ()
    return scores, {name: float(value) for name, value in reported if isinstance(value, int | float)}


def _drawn(snapshots: NDArray, renderer: Renderer | None, identity: Identity) -> NDArray:
    if renderer is None:
        raise ValueError(f"scorer {identity.name!r} needs {identity.needs}, but the clips carry no renderer")
    if identity.needs == "frames":
        return renderer.render(snapshots, identity.frame_size)
    return renderer.observe(snapshots)


def _distinct(rows: NDArray) -> tuple[NDArray, NDArray[np.int64]]:
    """Returns the distinct rows ``[U, …]`` in order of first appearance, and which one each row is, ``int64[N]``."""
    rows = np.ascontiguousarray(rows)
    seen: dict[bytes, int] = {}
    index = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows])
    first = np.full(len(seen), len(rows))
    np.minimum.at(first, index, np.arange(len(rows)))
    return rows[first], index


def _checked(found: dict[str, Any]) -> Header:
    def natural(value: Any, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31

    clips, length, lengths, shape = (found.get(name) for name in ("clips", "length", "lengths", "shape"))
    if not (natural(clips, 1) and natural(length, 1)):
        raise WireError("the header tells no proper number of clips and frames")
    assert isinstance(clips, int)
    assert isinstance(length, int)
    if not isinstance(lengths, list) or len(lengths) != clips:
        raise WireError("the header tells not one length per clip")
    if not all(natural(part, 1) and part <= length for part in lengths):
        raise WireError(f"a clip's length is not between 1 and {length}")
    if not isinstance(shape, list) or not shape or not all(natural(side, 1) for side in shape):
        raise WireError("the header tells no proper shape of rows")
    try:
        dtype = np.dtype(str(found.get("dtype")))
    except TypeError as error:
        raise WireError("the header tells no proper dtype") from error
    if dtype.kind not in _KINDS:
        raise WireError(f"rows of dtype {dtype} are not taken")
    identity = Identity.from_json(found.get("scorer"))
    if identity.needs == "frames" and (dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3):
        raise WireError(f"frames must be uint8[U, H, W, 3], got {dtype}{shape}")
    return Header(identity, clips, length, tuple(lengths), dtype, tuple(shape))
