from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vlmrb.callbacks import checkpoint_files
from vlmrb.callbacks.checkpoint_files import (
    LAST,
    REFERENCE_KEY,
    CheckpointError,
    CheckpointFolder,
    read_reference,
    read_sidecar,
    tensor_bytes,
    verify_sidecar,
)


def write_checkpoint(path: Path, reference: dict[str, Any] | None) -> None:
    torch.save({REFERENCE_KEY: reference, "weights": torch.ones(3)}, path)


def save(folder: CheckpointFolder, env_steps: int) -> Path:
    replay = {"buffer": {"rows": torch.full((64,), env_steps)}, "env_steps": env_steps}
    return folder.save(env_steps, replay, write_checkpoint)


def load_last(path: Path) -> int:
    """Loads the pair that last.ckpt names and returns its env steps."""
    reference = read_reference(path / LAST)
    assert reference is not None
    content = read_sidecar(verify_sidecar(path, reference))
    assert (content["buffer"]["rows"] == content["env_steps"]).all()
    return content["env_steps"]


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    result = CheckpointFolder(tmp_path / "run" / "checkpoints")
    result.prepare()
    return result


def test_a_pair_and_last_ckpt_can_be_loaded_again(folder: CheckpointFolder) -> None:
    checkpoint = save(folder, 7)
    assert read_reference(checkpoint) == read_reference(folder.path / LAST)
    assert load_last(folder.path) == 7


def test_the_newest_pairs_stay_and_nothing_else(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for env_steps in (1, 2, 3, 4):
        save(folder, env_steps)
    kept = [name.split("-")[1] for name in names(tmp_path) if name != LAST]
    assert kept == ["000000003", "000000004"] * 2
    assert load_last(tmp_path) == 4


def test_pairs_of_another_process_are_left_alone_unless_adopted(folder: CheckpointFolder) -> None:
    first = save(folder, 1)
    stranger = CheckpointFolder(folder.path)
    save(stranger, 2)
    assert first.exists()
    heir = CheckpointFolder(folder.path)
    heir.adopt()
    save(heir, 3)
    assert len(names(folder.path)) == 3
    assert load_last(folder.path) == 3


def test_without_replay_there_is_no_side_car(folder: CheckpointFolder) -> None:
    folder.save(5, None, write_checkpoint)
    assert read_reference(folder.path / LAST) is None
    assert not list(folder.path.glob("*.pt"))


def test_strays_of_a_killed_process_are_cleaned_at_the_next_save(folder: CheckpointFolder) -> None:
    save(folder, 1)
    for stray in ("replay-000000002-ab.pt", "replay-000000002-ab.pt.tmp", "checkpoint-000000002-ab.ckpt.tmp"):
        (folder.path / stray).write_bytes(b"half")
    (folder.path / "notes.txt").write_text("mine")
    save(folder, 3)
    assert len(names(folder.path)) == 4
    assert "notes.txt" in names(folder.path)


def test_a_side_car_named_by_a_renamed_checkpoint_stays(folder: CheckpointFolder) -> None:
    checkpoint = save(folder, 1)
    best = folder.path / "best.ckpt"
    sidecar = folder.path / read_reference(checkpoint)["file"]
    shutil.copy(checkpoint, best)
    shutil.copy(sidecar, folder.path / "kept")
    save(folder, 2)  # removes the pair it replaces
    shutil.move(folder.path / "kept", sidecar)
    save(folder, 3)
    assert verify_sidecar(folder.path, read_reference(best)) == sidecar


def test_an_unreadable_checkpoint_stops_the_clean_up_with_a_warning(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    (folder.path / "broken.ckpt").write_bytes(b"?")
    stray = folder.path / "replay-000000002-ab.pt"
    stray.write_bytes(b"who names me?")
    save(folder, 1)
    assert stray.exists()
    assert "broken.ckpt" in caplog.text


def test_views_are_saved_without_the_storage_below_them(folder: CheckpointFolder) -> None:
    capacity = torch.zeros(1_000_000)
    folder.save(1, {"buffer": [capacity[:10]], "env_steps": 1}, write_checkpoint)
    assert next(folder.path.glob("*.pt")).stat().st_size < 10_000


def test_adopted_pairs_that_were_removed_or_damaged_do_not_stop_a_save(folder: CheckpointFolder) -> None:
    first = save(folder, 1)
    second = save(CheckpointFolder(folder.path), 2)
    heir = CheckpointFolder(folder.path)
    heir.adopt()
    first.unlink()
    second.write_bytes(b"?")
    (folder.path / LAST).unlink()
    save(heir, 3)
    assert not second.exists()
    save(heir, 4)  # by now no .ckpt names their side-cars
    assert len(names(folder.path)) == 3


def test_tensor_bytes_counts_nested_tensors() -> None:
    tree = {"a": torch.zeros(3, dtype=torch.float64), "b": [torch.zeros(5, dtype=torch.uint8), ({"c": 1}, "text")]}
    assert tensor_bytes(tree) == 3 * 8 + 5


# Failures while saving


class Fault(NamedTuple):
    module: Any
    name: str


FAULTS = [
    Fault(os, "replace"),
    Fault(os, "fsync"),
    Fault(torch, "save"),
    Fault(shutil, "copyfile"),
    Fault(os, "open"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failure_at_any_step_leaves_a_loadable_pair_and_no_litter(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, fault: Fault, error: BaseException
) -> None:
    save(folder, 1)
    step, failed = 0, True
    while failed:
        step += 1
        assert step < 50
        failed = False
        real: Callable[..., Any] = getattr(fault.module, fault.name)
        calls = 0

        def broken(*args: Any, real: Callable[..., Any] = real, step: int = step, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                raise error
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(fault.module, fault.name, broken)
            try:
                save(folder, 1 + step)
            except type(error):
                failed = True
        assert load_last(folder.path) in range(1, 2 + step)
        for checkpoint in folder.path.glob("*.ckpt"):
            verify_sidecar(folder.path, read_reference(checkpoint))
        assert not list(folder.path.glob("*.tmp"))
        named = {read_reference(checkpoint)["file"] for checkpoint in folder.path.glob("*.ckpt")}
        assert {p.name for p in folder.path.glob("*.pt")} == named
    assert step > 1  # the fault did happen
    assert load_last(folder.path) == 1 + step
    assert len(names(folder.path)) == 3  # what the failures had kept was removed by the save that succeeded


def test_a_write_that_the_system_refuses_is_an_os_error_and_leaves_the_older_pair(folder: CheckpointFolder) -> None:
    save(folder, 1)
    big = {"buffer": torch.zeros(1_000_000), "env_steps": 2}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.save(2, big, write_checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_last(folder.path) == 1
    assert len(names(folder.path)) == 3


def test_too_little_room_is_refused_before_anything_is_written(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)
    before = names(folder.path)
    usage = shutil.disk_usage(folder.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4_100_000))
    with pytest.raises(OSError, match=r"checkpoints has 4\.1 MB free, but this checkpoint needs 4\.2 MB"):
        folder.save(2, {"buffer": torch.zeros(1_000_000), "env_steps": 2}, write_checkpoint)
    assert names(folder.path) == before
    assert load_last(folder.path) == 1


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot write checkpoints into .*file/checkpoints: Not a directory"):
        CheckpointFolder(tmp_path / "file" / "checkpoints").prepare()


def test_a_read_only_folder_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:  # root may write anywhere, so the system's answer is played
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint_files.tempfile, "TemporaryFile", refuse)
    with pytest.raises(CheckpointError, match="cannot write checkpoints into .*: Read-only file system"):
        CheckpointFolder(tmp_path).prepare()


# Side-cars that cannot be used


@pytest.fixture
def saved(folder: CheckpointFolder) -> tuple[Path, dict[str, Any]]:
    save(folder, 1)
    reference = read_reference(folder.path / LAST)
    assert reference is not None
    return folder.path, reference


def test_a_flipped_bit_in_the_side_car_is_found(saved: tuple[Path, dict[str, Any]]) -> None:
    path, reference = saved
    content = bytearray((path / reference["file"]).read_bytes())
    content[len(content) // 2] ^= 1
    (path / reference["file"]).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"replay-.* is damaged \(its SHA-256 differs\).*ignore_replay true"):
        verify_sidecar(path, reference)


def test_a_truncated_side_car_is_found(saved: tuple[Path, dict[str, Any]]) -> None:
    path, reference = saved
    os.truncate(path / reference["file"], 100)
    with pytest.raises(CheckpointError, match=r"is damaged \(100 bytes instead of .*ignore_replay true"):
        verify_sidecar(path, reference)


def test_a_missing_side_car_is_named(saved: tuple[Path, dict[str, Any]]) -> None:
    path, reference = saved
    (path / reference["file"]).unlink()
    with pytest.raises(CheckpointError, match=r"replay-.* is missing.*ignore_replay true"):
        verify_sidecar(path, reference)


def test_a_reference_cannot_lead_out_of_the_folder(saved: tuple[Path, dict[str, Any]]) -> None:
    path, reference = saved
    outside = path.parent / reference["file"]
    shutil.move(path / reference["file"], outside)
    with pytest.raises(CheckpointError, match="missing"):
        verify_sidecar(path, {**reference, "file": f"../{reference['file']}"})


@pytest.mark.parametrize(
    "content", [{"schema": 0, "buffer": {}}, {"buffer": {}}, [1, 2]], ids=["older", "none", "list"]
)
def test_a_side_car_of_another_schema_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "replay.pt")
    with pytest.raises(CheckpointError, match=r"has schema (0|None), this version of vlmrb reads schema 1.*ignore_rep"):
        read_sidecar(tmp_path / "replay.pt")


def test_a_side_car_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "replay.pt").write_bytes(b"not what it seems")
    with pytest.raises(CheckpointError, match=r"cannot be read .*ignore_replay true"):
        read_sidecar(tmp_path / "replay.pt")


def test_an_unreadable_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / LAST).write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"last\.ckpt is no readable checkpoint"):
        read_reference(tmp_path / LAST)
