from __future__ import annotations

import errno
import logging
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import ClipBatch

SCORER = SimpleNamespace(name="s", version="1", prompt="well?", frame_size=None)


def clips(snapshots, lengths=None, looks="room"):
    snapshots = np.asarray(snapshots)
    lengths = np.full(len(snapshots), snapshots.shape[1]) if lengths is None else np.asarray(lengths)
    return ClipBatch(np.arange(len(snapshots)), snapshots, lengths, SimpleNamespace(name=looks))


def some_clips(count=3):
    return np.random.default_rng(0).integers(0, 9, (count, 4, 6)).astype(np.uint8)


def key_of(number):
    return number.to_bytes(16, "big")


def scores_of(*values):
    return np.array(values, np.float32)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "scores.sqlite"


def files_beside(file):
    return [path for path in file.parent.iterdir() if path.name.startswith(f"{file.name}.damaged")]


class TestKeys:
    def test_equal_clips_have_equal_keys_wherever_they_stand(self):
        a, b, c = some_clips()
        cache = ScoreCache()
        keys = cache.keys(SCORER, clips([a, b, a]))
        assert keys[0] == keys[2] == cache.keys(SCORER, clips([a]))[0]
        assert keys[1] not in (keys[0], *cache.keys(SCORER, clips([c])))

    def test_padding_does_not_count_but_length_does(self):
        a, *_ = some_clips()
        other_padding = a.copy()
        other_padding[3] = 99
        (first, second) = ScoreCache().keys(SCORER, clips([a, other_padding], lengths=[3, 3]))
        assert first == second
        longer, shorter = ScoreCache().keys(SCORER, clips([a, a], lengths=[4, 3]))
        assert first == shorter != longer

    def test_the_amount_of_padding_counts_as_scorers_may_be_shown_it(self):
        (whole,) = some_clips(1)
        padded = np.concatenate([whole, whole[-1:]])
        keys = [ScoreCache().keys(SCORER, clips([content], lengths=[4]))[0] for content in (whole, padded)]
        assert keys[0] != keys[1]

    @pytest.mark.parametrize("part", ["name", "version", "prompt", "frame_size"])
    def test_every_part_of_the_scorers_identity_counts(self, part):
        batch = clips(some_clips())
        other = SimpleNamespace(**{**vars(SCORER), part: "other"})
        assert not set(ScoreCache().keys(SCORER, batch)) & set(ScoreCache().keys(other, batch))

    def test_the_looks_count(self):
        keys = [ScoreCache().keys(SCORER, clips(some_clips(), looks=looks))[0] for looks in ("room", "cave")]
        assert keys[0] != keys[1]

    def test_equal_bytes_of_another_type_or_shape_are_another_clip(self):
        snapshots = some_clips(1)
        variants = snapshots, snapshots.astype(np.int8), snapshots.reshape(1, 8, 3)
        assert len({ScoreCache().keys(SCORER, clips(variant))[0] for variant in variants}) == 3

    def test_clips_without_a_renderer_or_contiguous_memory_have_keys(self):
        snapshots = some_clips()
        plain = ClipBatch(np.arange(3), snapshots, np.full(3, 4))
        strided = ClipBatch(np.arange(3), np.asfortranarray(snapshots), np.full(3, 4))
        assert ScoreCache().keys(SCORER, plain) == ScoreCache().keys(SCORER, strided)


class TestScores:
    def test_what_was_put_comes_back_and_the_rest_is_nan(self):
        cache = ScoreCache()
        cache.put_many([key_of(1), key_of(2)], scores_of(0.25, 0))
        answer = cache.get_many([key_of(2), key_of(3), key_of(1)])
        assert answer.dtype == np.float32
        assert np.array_equal(answer, scores_of(0, np.nan, 0.25), equal_nan=True)
        assert (cache.hits, cache.misses) == (2, 1)

    @given(
        st.lists(
            st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=4)),
            max_size=30,
        ),
        st.integers(1, 6),
    )
    def test_the_least_recently_used_score_goes_first(self, operations, max_entries):
        cache, model = ScoreCache(max_entries=max_entries), OrderedDict()
        for step, (put, numbers) in enumerate(operations):
            if put:
                cache.put_many([key_of(n) for n in numbers], np.full(len(numbers), step / 30, np.float32))
                for n in numbers:
                    model[n] = np.float32(step / 30)
                    model.move_to_end(n)
                while len(model) > max_entries:
                    model.popitem(last=False)
            else:
                answer = cache.get_many([key_of(n) for n in numbers])
                assert np.array_equal(answer, scores_of(*(model.get(n, np.nan) for n in numbers)), equal_nan=True)
                for n in numbers:
                    if n in model:
                        model.move_to_end(n)
        assert len(cache) == len(model)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -0.1, 1.1])
    def test_what_is_no_score_is_refused_and_nothing_kept(self, bad):
        cache = ScoreCache()
        with pytest.raises(ValueError, match=r"^score cache: refused scores that are not numbers in \[0, 1\]$"):
            cache.put_many([key_of(1), key_of(2)], scores_of(0.5, bad))
        assert len(cache) == 0

    def test_a_score_too_few_is_refused(self):
        with pytest.raises(ValueError, match=r"^score cache: 2 keys came with scores of shape \(1,\)$"):
            ScoreCache().put_many([key_of(1), key_of(2)], scores_of(0.5))

    def test_a_memory_of_nothing_is_refused(self):
        with pytest.raises(ValueError, match=r"^a score cache must hold at least 1 entry, got max_entries=0$"):
            ScoreCache(max_entries=0)


class TestOnDisk:
    def test_scores_outlive_the_process_bit_for_bit(self, file):
        scores = np.random.default_rng(0).random(1200).astype(np.float32)
        keys = [key_of(n) for n in range(1200)]
        first = ScoreCache(file)
        first.put_many(keys, scores)
        first.close()
        second = ScoreCache(file)
        assert np.array_equal(second.get_many(keys), scores)
        assert second.stats() == {"hits": 1200, "misses": 0, "entries": 1200, "disk_errors": 0}
        second.close()

    def test_what_memory_let_go_is_read_from_the_file(self, file):
        cache = ScoreCache(file, max_entries=2)
        cache.put_many([key_of(n) for n in range(5)], scores_of(0, 0.25, 0.5, 0.75, 1))
        assert len(cache) == 2
        assert cache.get_many([key_of(n) for n in range(5)]).tolist() == [0, 0.25, 0.5, 0.75, 1]
        cache.close()

    def test_a_folder_holds_the_file_and_is_made_when_missing(self, tmp_path):
        cache = ScoreCache(tmp_path / "new" / "cache")
        assert cache.path == tmp_path / "new" / "cache" / "scores.sqlite"
        assert cache.path.is_file()
        cache.close()

    def test_runs_share_a_file(self, file):
        one, other = ScoreCache(file), ScoreCache(file)
        one.put_many([key_of(1)], scores_of(0.25))
        other.put_many([key_of(2)], scores_of(0.5))
        assert one.get_many([key_of(2)]) == 0.5
        assert other.get_many([key_of(1)]) == 0.25
        one.close()
        other.close()

    def test_closing_twice_is_fine_and_memory_goes_on(self, file):
        cache = ScoreCache(file)
        cache.close()
        cache.close()
        cache.put_many([key_of(1)], scores_of(0.25))
        assert cache.get_many([key_of(1)]) == 0.25

    @pytest.mark.slow
    def test_survives_being_killed_while_writing(self, file):
        program = f"""
import numpy as np
from vlmrb.scoring.cache import ScoreCache
cache = ScoreCache({str(file)!r})
for n in range(10**9):
    cache.put_many([(16 * n + i).to_bytes(16, "big") for i in range(16)], np.full(16, n % 2, np.float32))
    print(n, flush=True)
"""
        for _ in range(2):
            writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            assert writer.stdout is not None
            done = [int(writer.stdout.readline()) for _ in range(60)][-1]
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
            cache = ScoreCache(file)
            keys = [key_of(n) for n in range(16 * (done + 1))]
            assert np.array_equal(cache.get_many(keys), np.repeat(np.arange(done + 1) % 2, 16))
            assert cache.disk_errors == 0
            cache.close()
        assert not files_beside(file)


class TestTrouble:
    @pytest.mark.parametrize("content", [b'{"seed": 1}', b"SQLite", b"\0" * 5000])
    def test_a_file_of_another_kind_is_refused_and_left_alone(self, tmp_path, content):
        file = tmp_path / "settings.json"
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"scoring\.cache=.*settings\.json is a file of another kind") as error:
            ScoreCache(file)
        assert "\n" not in str(error.value)
        assert list(tmp_path.iterdir()) == [file]
        assert file.read_bytes() == content

    def test_an_empty_file_becomes_a_cache(self, file):
        file.touch()
        cache = ScoreCache(file)
        cache.put_many([key_of(1)], scores_of(0.25))
        cache.close()
        assert file.read_bytes().startswith(b"SQLite")
        assert not files_beside(file)

    @pytest.mark.parametrize("rest", [b"\xff" * 5000, b""], ids=["garbled", "cut off"])
    def test_a_damaged_file_is_kept_under_another_name(self, file, rest, caplog):
        content = b"SQLite format 3\x00" + rest
        file.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            cache = ScoreCache(file)
        cache.put_many([key_of(1)], scores_of(0.25))
        cache.close()
        (aside,) = files_beside(file)
        assert aside.read_bytes() == content
        (warning,) = caplog.messages
        assert aside.name in warning
        assert "starting afresh" in warning
        assert "\n" not in warning
        again = ScoreCache(file)
        assert again.get_many([key_of(1)]) == 0.25
        again.close()

    def test_a_file_of_another_schema_is_kept_under_another_name(self, file, caplog):
        with sqlite3.connect(file) as other:
            other.execute("PRAGMA user_version=7")
            other.execute("CREATE TABLE scores (clip TEXT)")
        other.close()
        cache = ScoreCache(file)
        cache.put_many([key_of(1)], scores_of(0.25))
        cache.close()
        assert "its schema is 7, this version reads 1" in caplog.text
        (aside,) = files_beside(file)
        with sqlite3.connect(aside) as kept:
            assert kept.execute("SELECT count(*) FROM scores").fetchone() == (0,)
        kept.close()

    def test_damage_met_while_running_is_set_aside_and_work_goes_on(self, file, caplog):
        keys = [key_of(n) for n in range(5000)]
        whole = ScoreCache(file)
        whole.put_many(keys, np.full(5000, 0.5, np.float32))
        whole.close()
        content = bytearray(file.read_bytes())
        content[8192:] = b"\x5a" * (len(content) - 8192)  # the header and the table's root stay sound
        file.write_bytes(content)

        cache = ScoreCache(file)
        answer = cache.get_many(keys)
        assert np.isnan(answer).any()
        cache.put_many(keys, np.full(5000, 0.25, np.float32))
        cache.close()
        assert cache.disk_errors >= 1
        assert [path.stat().st_size for path in files_beside(file)][:1] == [len(content)]
        again = ScoreCache(file)
        assert (again.get_many(keys) == 0.25).all()
        again.close()

    def test_a_full_disk_costs_only_the_disk(self, file, caplog):
        cache = ScoreCache(file)
        pages = cache._disk.execute("PRAGMA page_count").fetchone()[0]
        cache._disk.execute(f"PRAGMA max_page_count={pages}")  # SQLite then reports a full disk
        batches = [[key_of(100 * n + i) for i in range(100)] for n in range(20)]
        for batch in batches:
            cache.put_many(batch, np.full(100, 0.5, np.float32))
        assert cache.disk_errors > 1
        assert len(caplog.messages) == 1
        assert "full" in caplog.messages[0]
        assert all((cache.get_many(batch) == 0.5).all() for batch in batches)

        cache._disk.execute("PRAGMA max_page_count=1000000")  # there is room again
        cache.put_many([key_of(9999)], scores_of(0.75))
        cache.close()
        again = ScoreCache(file)
        assert again.get_many([key_of(9999)]) == 0.75
        again.close()

    def test_a_file_locked_by_another_program_is_not_waited_for_long(self, file):
        cache = ScoreCache(file)
        blocker = sqlite3.connect(file)
        blocker.execute("BEGIN IMMEDIATE")
        cache.put_many([key_of(1)], scores_of(0.25))
        assert cache.disk_errors == 1
        assert cache.get_many([key_of(1)]) == 0.25
        blocker.rollback()
        blocker.close()
        cache.put_many([key_of(2)], scores_of(0.5))
        cache.close()
        again = ScoreCache(file)
        assert np.array_equal(again.get_many([key_of(1), key_of(2)]), scores_of(np.nan, 0.5), equal_nan=True)
        again.close()

    def test_a_full_disk_is_called_that(self, tmp_path, monkeypatch):
        def connect(*args, **kwargs):
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(sqlite3, "connect", connect)
        with pytest.raises(OSError, match="disk I/O error") as other:
            ScoreCache(tmp_path / "scores.sqlite")
        assert other.value.errno == errno.EIO
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
        with pytest.raises(OSError, match="no space left on device") as full:
            ScoreCache(tmp_path / "scores.sqlite")
        assert full.value.errno == errno.ENOSPC

    def test_a_place_that_cannot_be_written_is_one_readable_line(self, tmp_path):
        (tmp_path / "taken").write_text("a file where a folder should be")
        with pytest.raises(OSError, match=r"scoring\.cache cannot be used .*taken") as error:
            ScoreCache(tmp_path / "taken" / "scores.sqlite")
        assert "\n" not in str(error.value)
        (tmp_path / "folder.sqlite").mkdir()
        (tmp_path / "folder.sqlite" / "scores.sqlite").mkdir()
        with pytest.raises(OSError, match=r"scoring\.cache cannot be opened") as error:
            ScoreCache(tmp_path / "folder.sqlite")
        assert "\n" not in str(error.value)


class TestResuming:
    def test_scores_in_memory_travel_in_a_checkpoint(self, tmp_path):
        cache = ScoreCache()
        cache.put_many([key_of(n) for n in range(3)], scores_of(0.1, 1 / 3, 1.0))
        torch.save(cache.state_dict(), tmp_path / "state.pt")
        resumed = ScoreCache()
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert resumed._memory == cache._memory  # in the same order: the least recently used goes first

    def test_an_empty_cache_has_a_state_as_well(self):
        cache = ScoreCache()
        cache.load_state_dict(ScoreCache().state_dict())
        assert len(cache) == 0

    def test_scores_that_a_file_keeps_are_not_kept_twice(self, file):
        cache = ScoreCache(file)
        cache.put_many([key_of(1)], scores_of(0.5))
        assert len(cache.state_dict()["scores"]) == 0
        cache.close()
