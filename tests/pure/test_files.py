"""Outputs appear complete or not at all, and only files that we made are removed."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from megatron_eqlen.files import (
    new_folder,
    remove_partial,
    step_folders,
    step_name,
    step_number,
    write_json,
    write_text,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def start(function, *args) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def make_and_wait(path: Path, ready, go_on) -> None:
    with new_folder(path) as partial:
        (partial / "data").write_text("whole")
        ready.set()
        go_on.wait()


@pytest.fixture
def maker(tmp_path):
    """Start another process in the middle of making ``tmp_path/out``; return it and the event that lets it
    finish."""
    ready, go_on = multiprocessing.Event(), multiprocessing.Event()
    process = start(make_and_wait, tmp_path / "out", ready, go_on)
    assert ready.wait(30)
    yield process, go_on
    process.kill()
    process.join()


def test_a_folder_appears_whole_and_alone_beside_a_users_of_similar_names(tmp_path):
    users = [tmp_path / "deep" / mine for mine in ("out.partial", ".out.0123abcd.partial")]
    for folder in users:
        folder.mkdir(parents=True)
        (folder / "precious").touch()
    with new_folder(tmp_path / "deep" / "out") as partial:
        (partial / "data").write_text("whole")
        assert not (tmp_path / "deep" / "out").exists()
    assert names(tmp_path / "deep") == {"out", *(folder.name for folder in users)}
    assert (tmp_path / "deep" / "out" / "data").read_text() == "whole"
    assert all((folder / "precious").exists() for folder in users)


def fail_half_way(path: Path, error: type[BaseException]) -> None:
    with new_folder(path) as partial:
        (partial / "data").write_text("half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, error):
    with pytest.raises(error):
        fail_half_way(tmp_path / "out", error)
    assert names(tmp_path) == set()


def test_two_makers_of_one_folder_do_not_mix(tmp_path, maker):
    process, go_on = maker
    with (
        pytest.raises(ValueError, match="out: another process is writing it, or was killed and left"),
        new_folder(tmp_path / "out"),
    ):
        pytest.fail("both write")
    with new_folder(tmp_path / "other"):
        pass
    go_on.set()
    process.join()
    assert (tmp_path / "out" / "data").read_text() == "whole"
    assert names(tmp_path) == {"out", "other"}


def test_the_rest_of_a_killed_maker_is_removed_where_nobody_else_writes(tmp_path, maker):
    process, _ = maker
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (tmp_path / "out.partial").mkdir()
    assert names(tmp_path) == {".out.partial", "out.partial"}
    remove_partial(tmp_path)
    with new_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == {"out", "out.partial"}


def make_while_a_user_does(path: Path) -> None:
    with new_folder(path):
        path.mkdir()
        (path / "precious").touch()


def test_an_output_that_appeared_meanwhile_or_is_a_dangling_link_is_not_replaced(tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        make_while_a_user_does(tmp_path / "out")
    assert names(tmp_path / "out") == {"precious"}
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="exists already"), new_folder(tmp_path / "link"):
        pytest.fail("overwrites a link")


def test_a_file_is_replaced_whole(tmp_path):
    write_text(tmp_path / "a", "old")
    write_json(tmp_path / "a", {"new": 1})
    assert (tmp_path / "a").read_text() == '{\n "new": 1\n}\n'
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a", "\ud800")
    assert (tmp_path / "a").read_text() == '{\n "new": 1\n}\n'
    assert names(tmp_path) == {"a"}


def test_step_names_are_read_back_and_those_of_other_folders_are_no_steps():
    for step in (0, 12, 99_999_999, 123_456_789):
        assert step_number(step_name(step)) == step
    for name in ("step-12", "step-00000012-damaged", "step--0000012", ".step-00000012", "latest"):
        assert step_number(name) is None


def test_folders_of_steps_are_those_with_a_steps_name_in_the_order_of_their_numbers(tmp_path):
    numbers = [100_000_000, 3, 20]
    for number in numbers:
        (tmp_path / step_name(number)).mkdir()
    (tmp_path / step_name(4)).touch()
    for other in ("step-5", "step-00000006.partial", "stale-step-00000007"):
        (tmp_path / other).mkdir()
    assert step_folders(tmp_path) == [(n, tmp_path / step_name(n)) for n in sorted(numbers)]
    assert step_folders(tmp_path / "nothing") == []
