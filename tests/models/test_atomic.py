import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from midus.errors import MidusError
from midus.models import atomic
from midus.models.atomic import atomic_folder, check_space, recover


def write(folder: Path, text: str) -> None:
    (folder / "model.safetensors").write_text(text)
    (folder / "config.json").write_text(text)


def read(folder: Path) -> str:
    return (folder / "config.json").read_text()


def left_over(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.name.startswith("."))


def test_a_folder_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "out"
    with atomic_folder(target) as work:
        assert not target.exists()
        write(work, "new")
    assert read(target) == "new"
    assert left_over(target.parent) == []


def test_everything_is_on_disk_before_it_is_renamed(tmp_path, monkeypatch):
    events = []
    fsync, rename = atomic.fsync, os.rename
    monkeypatch.setattr(atomic, "fsync", lambda path: (events.append(path.name), fsync(path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(Path(b).name), rename(a, b)))
    with atomic_folder(tmp_path / "out") as work:
        write(work, "new")
    before = events[: events.index("out")]
    # The config waits under another name until the weights and the folder are synced.
    assert before.index("model.safetensors") < before.index("config.json")
    assert before[-2:] == ["config.json", work.name]
    assert events[-1] == tmp_path.name


def test_an_error_leaves_nothing(tmp_path):
    def fail():
        with atomic_folder(tmp_path / "out") as work:
            write(work, "new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_unless_asked(tmp_path):
    write_target(tmp_path / "out")
    with pytest.raises(MidusError, match="exists; choose another folder or pass --overwrite"):
        atomic_folder(tmp_path / "out").__enter__()
    assert read(tmp_path / "out") == "old"


def write_target(target: Path) -> Path:
    target.mkdir()
    write(target, "old")
    return target


@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwriting_replaces_the_whole_folder(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    target = write_target(tmp_path / "out")
    (target / "stale.safetensors").touch()
    with atomic_folder(target, overwrite=True) as work:
        write(work, "new")
        assert read(target) == "old"
    assert read(target) == "new"
    assert not (target / "stale.safetensors").exists()
    assert left_over(tmp_path) == []


def test_this_system_exchanges_folders_in_one_step(tmp_path):
    a, b = write_target(tmp_path / "a"), tmp_path / "b"
    b.mkdir()
    write(b, "other")
    assert atomic._exchange(a, b)
    assert (read(a), read(b)) == ("other", "old")


def test_only_model_folders_are_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").touch()
    with pytest.raises(MidusError, match="is not a model folder"):
        atomic_folder(tmp_path / "home", overwrite=True).__enter__()
    assert (tmp_path / "home" / "letter.txt").exists()


def test_other_programs_files_can_stay(tmp_path):
    target = write_target(tmp_path / "out")
    (target / "runs").mkdir()
    (target / "runs" / "events").write_text("log")
    (target / "model-00001-of-00002.safetensors").touch()
    with (target / "runs" / "events").open("a") as log:
        with atomic_folder(target, overwrite=True, keep_others=True) as work:
            write(work, "new")
        log.write(" goes on")
    assert read(target) == "new"
    assert (target / "runs" / "events").read_text() == "log goes on"
    assert not (target / "model-00001-of-00002.safetensors").exists()


def test_only_the_models_own_files_are_replaced(tmp_path):
    target = write_target(tmp_path / "out")
    others = ["adapter_model.safetensors", "notes.index.json", "optimizer.pt"]
    for name in others:
        (target / name).write_text(name)
    (target / "dangling").symlink_to("nowhere")
    (tmp_path / "elsewhere").mkdir()
    (target / "linked").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(target / "pipe")
    with atomic_folder(target, keep_others=True) as work:
        write(work, "new")
    assert [(target / name).read_text() for name in others] == others
    assert (target / "dangling").is_symlink()
    assert (target / "linked").is_symlink()
    assert (target / "pipe").is_fifo()


def test_a_folder_without_a_model_can_receive_one(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trainer_state.json").write_text("{}")
    with atomic_folder(tmp_path / "out", keep_others=True) as work:
        write(work, "new")
    assert read(tmp_path / "out") == "new"
    assert (tmp_path / "out" / "trainer_state.json").exists()


@pytest.mark.parametrize("keep_others", [True, False])
def test_the_current_directory_stays_where_it_is(tmp_path, monkeypatch, keep_others):
    target = write_target(tmp_path / "out")
    if keep_others:
        (target / "letter").touch()
    monkeypatch.chdir(target)
    with atomic_folder(Path(), overwrite=True, keep_others=keep_others) as work:
        write(work, "new")
    assert Path.cwd() == target
    assert read(Path()) == "new"
    assert Path("letter").exists() == keep_others
    assert left_over(tmp_path) == left_over(target) == []


def test_a_mount_point_is_filled_in_place(tmp_path, monkeypatch):
    target = write_target(tmp_path / "out")
    real = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda p: Path(p) == target or real(p))
    inode = target.stat().st_ino
    with atomic_folder(target, overwrite=True) as work:
        assert work.parent == target  # on the same file system
        write(work, "new")
    assert read(target) == "new"
    assert target.stat().st_ino == inode
    assert left_over(target) == []


def test_a_folder_that_appeared_meanwhile_is_not_overwritten(tmp_path):
    def race():
        with atomic_folder(tmp_path / "out") as work:
            write(work, "mine")
            write_target(tmp_path / "out")

    with pytest.raises(MidusError, match="appeared while it was being made"):
        race()
    assert read(tmp_path / "out") == "old"


@pytest.mark.parametrize("name", ["br[1]*?", "x" * 250, "with space"])
def test_unusual_names(tmp_path, monkeypatch, name):
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    target = write_target(tmp_path / name)
    with atomic_folder(target, overwrite=True) as work:
        write(work, "new")
    assert read(target) == "new"
    assert left_over(tmp_path) == []
    target.rename(tmp_path / f".{atomic._short_name(target)}.old-1234")
    recover(target)
    assert read(target) == "new"


@pytest.mark.parametrize("parent", ["file", "long"])
def test_impossible_places_are_one_sentence(tmp_path, parent):
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "out" if parent == "file" else tmp_path / ("x" * 300)
    with pytest.raises(MidusError, match="cannot be written"):
        atomic_folder(target).__enter__()


def test_after_a_cut_off_replacement_other_files_are_still_carried_over(tmp_path):
    target = write_target(tmp_path / "out")
    (target / "trainer_state.json").touch()
    target.rename(tmp_path / ".out.old-1234")
    with atomic_folder(target, keep_others=True) as work:
        write(work, "new")
    assert read(target) == "new"
    assert (target / "trainer_state.json").exists()


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    write_target(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_folder(tmp_path / "link", overwrite=True) as work:
        write(work, "new")
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "real") == "new"


def test_a_full_disk_is_one_sentence_and_changes_nothing(tmp_path):
    target = write_target(tmp_path / "out")

    def fill_the_disk(error):
        with atomic_folder(target, overwrite=True):
            raise error

    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ):
        with pytest.raises(MidusError, match="no space left on the disk"):
            fill_the_disk(error)
        assert read(target) == "old"
    assert left_over(tmp_path) == []


def test_too_little_space_is_noticed_before_writing(tmp_path):
    with pytest.raises(MidusError, match=r"needs 1,000,000,000,000.0 MB and the disk has"):
        check_space(tmp_path / "out", 10**18)


def test_cut_off_between_two_renames_the_old_folder_comes_back(tmp_path):
    write_target(tmp_path / "out").rename(tmp_path / ".out.old-1234")
    recover(tmp_path / "out")
    assert read(tmp_path / "out") == "old"


def test_leftovers_of_dead_processes_are_swept(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
    )
    left = tmp_path / f"{atomic._saving_prefix(tmp_path / 'out')}{int(dead.stdout)}-abcd"
    left.mkdir()
    alive = tmp_path / f"{atomic._saving_prefix(tmp_path / 'out')}{os.getpid()}-abcd"
    alive.mkdir()
    with atomic_folder(tmp_path / "out") as work:
        write(work, "new")
    assert not left.exists()
    assert alive.exists()


@pytest.mark.slow
@pytest.mark.parametrize("can_exchange", ["exchange", "two-renames"])
def test_kills_at_random_moments_leave_whole_folders(tmp_path, can_exchange):
    """Of saves and overwrites 20 each are killed; every folder that is there loads and verifies."""
    script = Path(__file__).parent / "killed_saves.py"
    result = subprocess.run(
        [sys.executable, script, tmp_path, can_exchange],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = dict(line.split("=") for line in result.stdout.split())
    assert min(int(counts["killed_saves"]), int(counts["killed_overwrites"])) >= 20
    assert int(counts["old"]) > 0


def test_a_killed_writer_is_really_killed(tmp_path):
    """The kill test's own tool: a process stopped in the middle leaves no target."""
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from midus.models.atomic import atomic_folder\n"
        f"with atomic_folder(Path({str(tmp_path / 'out')!r})) as work:\n"
        "    (work / 'model.safetensors').write_text('x')\n"
        "    print('in', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"in\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
