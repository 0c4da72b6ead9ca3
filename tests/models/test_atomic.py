import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    write_target(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_folder(tmp_path / "link", overwrite=True) as work:
        write(work, "new")
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "real") == "new"


def test_a_full_disk_is_one_sentence_and_changes_nothing(tmp_path):
    target = write_target(tmp_path / "out")

    def fill_the_disk():
        with atomic_folder(target, overwrite=True):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(MidusError, match="no space left on the disk"):
        fill_the_disk()
    assert read(target) == "old"
    assert left_over(tmp_path) == []


def test_too_little_space_is_noticed_before_writing(tmp_path):
    with pytest.raises(MidusError, match=r"needs 1000000000.00 GB and the disk has"):
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
