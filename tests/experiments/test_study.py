from __future__ import annotations

from pathlib import Path

import pytest

from vlmrb.experiments.cells import Scheme
from vlmrb.experiments.study import Study, as_arguments, parse_seeds, read_study

STUDY = """
name: mine
configs: [small.yaml, large.yaml]
schemes:
  uniform: uniform.yaml
  vlm: [vlm.yaml, --replay.lam_max 0.25]
  bare:
seeds: 0-1
overrides: ["--training.gamma 0.9", "--trainer.accelerator=cpu"]
jobs: 3
resources: {num_gpus: 0.25}
out: runs/there
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "large", "uniform", "vlm"):
        Path(f"{name}.yaml").write_text("replay: {capacity: 1000}\n")


def write(content: str) -> str:
    Path("study.yaml").write_text(content)
    return "study.yaml"


def test_study_file_says_everything() -> None:
    study = read_study(write(STUDY))
    assert study == Study(
        name="mine",
        configs=(Path("small.yaml"), Path("large.yaml")),
        schemes=(
            Scheme("uniform", ("uniform.yaml",)),
            Scheme("vlm", ("vlm.yaml", "--replay.lam_max 0.25")),
            Scheme("bare", ()),
        ),
        seeds=(0, 1),
        out=Path("runs/there"),
        overrides=("--training.gamma", "0.9", "--trainer.accelerator=cpu"),
        jobs=3,
        resources={"num_cpus": 1.0, "num_gpus": 0.25},
    )


def test_cells_are_the_grid_seed_by_seed_in_folders_of_their_names() -> None:
    cells = read_study(write(STUDY)).cells()
    assert len(cells) == 2 * 3 * 2
    assert [str(cell.folder) for cell in cells[:4]] == [
        "runs/there/small/uniform/seed_0",
        "runs/there/small/vlm/seed_0",
        "runs/there/small/bare/seed_0",
        "runs/there/large/uniform/seed_0",
    ]
    assert [cell.seed for cell in cells] == [0] * 6 + [1] * 6
    assert " ".join(cells[1].arguments) == (
        "-c small.yaml -c vlm.yaml --replay.lam_max 0.25 --training.gamma 0.9 --trainer.accelerator=cpu"
    )


def test_what_the_file_leaves_out_has_defaults() -> None:
    study = read_study(write("configs: small.yaml\nschemes: {uniform: uniform.yaml}\n"))
    assert (study.name, study.out, study.seeds) == ("study", Path("runs/study"), (0, 1, 2, 3, 4))
    assert (study.jobs, study.overrides, study.resources) == (None, (), {"num_cpus": 1.0, "num_gpus": 0.0})


def test_command_line_wins_over_the_file_and_adds_its_overrides() -> None:
    study = read_study(write(STUDY), seeds="7", out="here", jobs=1, overrides=["--replay.n_steps", "3"])
    assert (study.seeds, study.out, study.jobs) == ((7,), Path("here"), 1)
    assert study.overrides[-3:] == ("--trainer.accelerator=cpu", "--replay.n_steps", "3")


def test_written_study_reads_back() -> None:
    study = read_study(write(STUDY))
    assert read_study(write(study.to_yaml())) == study


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seeds:", "seed:"), "study study.yaml: unknown key 'seed', did you mean seeds?"),
        (("configs:", "config:"), "unknown key 'config', did you mean configs?"),
        (("vlm.yaml,", "vml.yaml,"), "scheme vlm: overlay vml.yaml does not exist; did you mean vlm.yaml?"),
        (("uniform: uniform.yaml", "uniform: nothing_like_it.yaml"), "there are large.yaml, small.yaml, study.yaml"),
        (("uniform: uniform.yaml", "uniform: no/such/folder.yaml"), "overlay no/such/folder.yaml does not exist in /"),
        (("large.yaml", "huge.yaml"), "configuration huge.yaml does not exist"),
        (("large.yaml", "small.yaml"), "configs: small comes twice"),
        (("  vlm:", "  uniform:"), "'uniform' comes twice"),
        (("jobs: 3", "jobs: 3\njobs: 4"), "'jobs' comes twice"),
        (("uniform:", "uni/form:"), "scheme 'uni/form': labels name folders"),
        (("uniform:", "1:"), "schemes: expected text, got 1; put it in quotes"),
        (("seeds: 0-1", "seeds: all"), "seeds='all'"),
        (("seeds: 0-1", "seeds: []"), "seeds: name at least one"),
        (("seeds: 0-1", "seeds: 0-40000000"), "these are 40,000,001 seeds, and a study has at most 10,000"),
        (("seeds: 0-1", "seeds: 4294967296"), "seeds go from 0 to 4294967295"),
        (("name: mine", "name: ../../etc"), "name '../../etc': it names a folder"),
        (("vlm:", "results.csv:"), "schemes: results.csv cannot name a folder"),
        (("vlm:", "Table.csv:"), "schemes: Table.csv cannot name a folder"),
        (("vlm:", "curves.png:"), "schemes: curves.png cannot name a folder"),
        (("large.yaml", "study.yaml.yaml"), "configs: study.yaml cannot name a folder"),
        (("large.yaml", "..yaml"), "configs: . cannot name a folder"),
        (("jobs: 3", "jobs: many"), "jobs='many'"),
        (("jobs: 3", "jobs: 0"), "jobs=0 must be at least 1"),
        (("num_gpus: 0.25", "num_gpu: 1"), "expected numbers for num_cpus, num_gpus"),
        (("num_gpus: 0.25", "num_gpus: -1"), "resources.num_gpus=-1"),
        (("num_gpus: 0.25", "num_cpus: 0"), "resources.num_cpus must be above 0"),
        (("num_gpus: 0.25", "num_cpus: 1.0e-320"), "must be at least 0.0001"),
        (("num_gpus: 0.25", "num_cpus: .inf"), "resources.num_cpus=inf must be a number from 0 to 1,000,000"),
        (("num_gpus: 0.25", "num_gpus: .nan"), "resources.num_gpus=nan must be a number"),
        (
            ("--replay.lam_max 0.25", '"--env.id \'x"'),
            'scheme vlm: "--env.id \'x" cannot be read: No closing quotation',
        ),
        (("--training.gamma 0.9", "--env.id 'x"), 'overrides: "--env.id \'x" cannot be read: No closing quotation'),
        (("--replay.lam_max 0.25", "--run_dir x"), "scheme vlm: --run_dir has no place here"),
        (("--replay.lam_max 0.25", "-c x.yaml"), "scheme vlm: -c has no place here: name overlays by their paths"),
        (("--training.gamma 0.9", "--seed_everything=3"), "overrides: --seed_everything has no place here"),
        (("--replay.lam_max 0.25", "0.25"), "scheme vlm: expected text, got 0.25"),
        (("schemes:", "schemes: []\nx:"), "unknown key 'x'"),
        (("configs: [small.yaml, large.yaml]", "configs: []"), "configs is missing"),
        (("name: mine", "name: [mine"), "is no YAML"),
        ((STUDY, ""), "holds no settings"),
        ((STUDY, "configs: small.yaml\nschemes: [uniform.yaml]\n"), "schemes: expected labels"),
    ],
)
def test_mistake_in_a_study_is_named(change: tuple[str, str], says: str) -> None:
    assert change[0] in STUDY
    with pytest.raises(ValueError, match="^study study.yaml") as caught:
        read_study(write(STUDY.replace(*change)))
    assert says in str(caught.value)


def test_missing_study_is_named_with_what_there_is() -> None:
    Path("studies").mkdir()
    Path("studies/small_schemes.yaml").touch()
    with pytest.raises(ValueError, match="cannot be read.* did you mean studies/small_schemes.yaml"):
        read_study("studies/smal_schemes.yaml")


@pytest.mark.parametrize(
    ("value", "seeds"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("5", (5,)),
        (5, (5,)),
        ("1,4-5", (1, 4, 5)),
        (" 2, 7", (2, 7)),
        ("1,0-1", (1, 0)),
        ([0, 2], (0, 2)),
        ("4294967295", (2**32 - 1,)),
    ],
)
def test_seeds_are_ranges_and_lists(value: object, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(value) == seeds


@pytest.mark.parametrize(
    "value", ["", "a", "1-", "-3", "5-3", None, -1, [-1], 0.5, {"a": 1}, "9" * 5000, "0-" + "9" * 5000]
)
def test_unreadable_seeds_are_named(value: object) -> None:
    with pytest.raises(ValueError, match="seeds="):
        parse_seeds(value)


def test_options_may_be_given_with_their_values_or_apart() -> None:
    apart = ["--replay.lam_max", "0.5", "--env.actions", "[0, 1]"]
    assert as_arguments(apart, "overrides") == tuple(apart)
    assert as_arguments(["--replay.lam_max 0.5", "--env.actions '[0, 1]'"], "overrides") == tuple(apart)
