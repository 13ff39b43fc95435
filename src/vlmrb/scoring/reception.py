"""Takes completed clips in: known scores are found, the rest is queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.admission import AdmissionQueue
from vlmrb.scoring.audit import Audit
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.scorer import Scorer

if TYPE_CHECKING:
    from vlmrb.replay.clips import ClipStore
    from vlmrb.scoring.student.desk import StudentDesk


class Reception:
    """Looks at clips once: are they known, what does the policy want to remember of them, are they audited?

    Args:
        clips: where they are kept.
        renderer: draws them; ``None`` if nobody asks for frames or observations.
        scorer: whose scores are asked for.
        cache: known scores; ``None`` knows none.
        audit: draws what is scored in any case; ``None`` draws nothing.
        queue: where those not known wait.
        desk: where they go first, if there is a student.
        frames_per_clip: most frames of a clip that the scorer is shown; ``None`` shows all.
    """

    def __init__(
        self,
        clips: ClipStore,
        renderer: Renderer | None,
        scorer: Scorer,
        cache: ScoreCache | None,
        audit: Audit | None,
        queue: AdmissionQueue,
        frames_per_clip: int | None,
        desk: StudentDesk | None = None,
    ) -> None:
        self._clips = clips
        self._renderer = renderer
        self._scorer = scorer
        self._cache = cache
        self._audit = audit
        self._queue = queue
        self._frames_per_clip = frames_per_clip
        self._add = queue.add if desk is None else desk.add

    def admit(self, clip_ids: Sequence[int], env_steps: int) -> tuple[list[int], list[bytes], NDArray[np.float32]]:
        """Takes in clips that have just been completed and are in the store.

        Args:
            clip_ids: in order of completion.
            env_steps: env steps at their completion.

        Returns:
            Those whose score is known, their keys, and these scores ``float32[K]``; the others wait in the queue.
        """
        looks = self.look(clip_ids)
        if looks and looks[0][1] is not None:
            self._queue.policy.note([described for _, described in looks])
        unknown = np.full(len(clip_ids), np.nan, np.float32)
        scores = unknown if self._cache is None else self._cache.get_many([key for key, _ in looks])
        audited = np.zeros(len(clip_ids), bool) if self._audit is None else self._audit.draw(len(clip_ids))
        known = ~np.isnan(scores)
        each = zip(looks, clip_ids, known.tolist(), audited.tolist(), strict=True)
        for (key, described), clip_id, is_known, is_audited in each:
            if not is_known:
                self._add(key, clip_id, env_steps, described=described, audited=is_audited)
        if self._audit is not None:
            self._audit.scored(scores[known & audited])
        rows = np.flatnonzero(known).tolist()
        return [clip_ids[row] for row in rows], [looks[row][0] for row in rows], scores[known]

    def look(self, clip_ids: Sequence[int]) -> list[tuple[bytes, Any]]:
        """Returns the keys of clips in the store, and what the policy says of their content."""
        if not clip_ids:
            return []
        clips = self._clips.batch(clip_ids, self._renderer)
        described = self._queue.policy.describe(clips)
        if self._cache is None:
            keys = [clip_id.to_bytes(8) for clip_id in clip_ids]
        else:
            keys = self._cache.keys(self._scorer, self.thinned(clips))
        return list(zip(keys, [None] * len(keys) if described is None else described, strict=True))

    def shown(self, clip_ids: Sequence[int]) -> ClipBatch:
        """Returns clips in the store as the scorer is shown them."""
        return self.thinned(self._clips.batch(clip_ids, self._renderer))

    def thinned(self, clips: ClipBatch) -> ClipBatch:
        """Returns clips with the frames that the scorer is shown."""
        return clips if self._frames_per_clip is None else clips.thinned(self._frames_per_clip)
