import os
import signal
import time

import pytest

from ckptkit.errors import CkptError, Mismatch
from ckptkit.training.launch import Report, launch
from ckptkit.training.parallel.ranks import RankPlace


def refuse_on_rank_1(place: RankPlace, report: Report) -> None:
    report("started")
    if place.rank == 1:
        raise Mismatch("two ranks do not fit", tensor="a.weight", hint="use one")
    time.sleep(600)


def die_on_rank_1(place: RankPlace, report: Report) -> None:
    report(os.getpid())
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def chatter(place: RankPlace, report: Report) -> None:
    os.write(1, b"noise")
    report("result")


def leave_early(place: RankPlace, report: Report) -> None:
    os._exit(7)


def test_an_error_of_a_rank_arrives_as_it_was() -> None:
    with pytest.raises(Mismatch, match="two ranks do not fit") as raised:
        launch(refuse_on_rank_1, 2, lambda _: None)
    assert (raised.value.tensor, raised.value.hint) == ("a.weight", "use one")


def test_a_dead_rank_ends_the_run_and_the_other_ranks() -> None:
    heard: list[int] = []
    with pytest.raises(CkptError, match="rank 1 was ended by SIGKILL"):
        launch(die_on_rank_1, 2, heard.append)
    for pid in heard:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_leaves_early_ends_the_run() -> None:
    with pytest.raises(CkptError, match="rank 0 failed with exit code 7"):
        launch(leave_early, 1, lambda _: None)


def test_what_libraries_print_is_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []
    launch(chatter, 1, heard.append)
    assert heard == ["result"]
    assert capfd.readouterr() == ("", "noise")
