from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from finished_cells import make_cell, train

from vlmrb.experiments.cells import last_line, recorded_cells, require_same_settings


def test_same_command_goes_on_wherever_its_files_lie(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep", overrides=["--training.gamma", "0.9"])
    train(cell, [0.0, 1.0, 1.0])
    moved = tmp_path / "elsewhere.yaml"
    cell.config.rename(moved)
    moved.write_text(f"# a comment\n{moved.read_text()}")
    same = type(cell)(moved, cell.overlay, cell.seed, cell.folder, cell.overrides)
    require_same_settings([same], tmp_path / "sweep")


def test_other_overrides_are_refused(tmp_path: Path) -> None:
    train(make_cell(tmp_path / "sweep", overrides=["--training.gamma", "0.9"]), [0.0, 1.0, 1.0])
    with pytest.raises(
        ValueError, match=r'uniform/seed_0 was run with --overrides \["--training.gamma", "0.9"\]: .*--out'
    ):
        require_same_settings([make_cell(tmp_path / "sweep")], tmp_path / "sweep")


@pytest.mark.parametrize(("file", "name"), [("base", "--base"), ("uniform", "overlay")])
def test_edited_file_is_refused(tmp_path: Path, file: str, name: str) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0], finished=False, exit_code=143)
    (tmp_path / f"{file}.yaml").write_text("replay: {capacity: 1001}\n")
    with pytest.raises(ValueError, match=f"uniform/seed_0 was run with another content of .*{name}"):
        require_same_settings([cell], tmp_path / "sweep")


def test_other_cells_of_other_settings_are_refused_since_one_table_holds_all(tmp_path: Path) -> None:
    train(make_cell(tmp_path / "sweep", seed=0, overrides=["--training.gamma", "0.9"]), [0.0, 1.0, 1.0])
    for scheme, seed in (("uniform", 1), ("vlm", 0)):
        with pytest.raises(ValueError, match="uniform/seed_0 was run with"):
            require_same_settings([make_cell(tmp_path / "sweep", scheme, seed)], tmp_path / "sweep")


def test_other_schemes_may_differ_in_their_overlay(tmp_path: Path) -> None:
    train(make_cell(tmp_path / "sweep"), [0.0, 1.0, 1.0])
    other = make_cell(tmp_path / "sweep", "vlm")
    other.overlay.write_text("replay: {capacity: 7}\n")
    require_same_settings([other], tmp_path / "sweep")


def test_failed_start_may_be_repeated_with_other_settings(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep", overrides=["--no_such_option"])
    cell.record_start()
    cell.record_end(2)
    require_same_settings([make_cell(tmp_path / "sweep")], tmp_path / "sweep")


def test_run_of_unknown_settings_is_refused(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    (cell.folder / "cell.json").unlink()
    with pytest.raises(ValueError, match="no sweep has recorded"):
        require_same_settings([cell], tmp_path / "sweep")


@pytest.mark.parametrize("torn", ["", '{"success": 0.5, "fini', "[]"])
def test_torn_summary_counts_as_unfinished(tmp_path: Path, torn: str) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0], exit_code=None)
    assert cell.finished
    (cell.folder / "summary.json").write_text(torn)
    assert not cell.finished
    assert cell.status == "unfinished"


@pytest.mark.parametrize(("code", "status"), [(143, "interrupted"), (-2, "interrupted"), (1, "failed"), (-9, "failed")])
def test_exit_code_decides_what_an_unfinished_cell_is_called(tmp_path: Path, code: int, status: str) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 0.1, 0.2], finished=False, exit_code=code)
    assert cell.status == status


def test_copy_of_a_cell_under_another_name_is_no_cell(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    shutil.copytree(cell.folder, cell.folder.with_name("seed_0.old1"))
    assert recorded_cells(tmp_path / "sweep") == [cell]


def test_last_line_is_the_last_that_says_something(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("one\rtwo\nvlmrb fit: error: three\n \n")
    assert last_line(tmp_path / "log.txt") == "vlmrb fit: error: three"
    assert last_line(tmp_path / "none.txt") == "it printed nothing"
