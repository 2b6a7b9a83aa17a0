"""The report of a run: what is on the page, from which sources, and which files it may replace."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import Corrupt, NotACheckpoint, Occupied, Unsafe, Usage
from ckptkit.plugins.report import history
from ckptkit.plugins.report.history import read_history, read_metrics_jsonl
from ckptkit.plugins.report.report import report
from tests import producers
from tests.conftest import Produce
from tests.plugins.report.runs import HOSTILE, LAYERS, make_run

VOID = {"meta", "br", "rect", "line", "circle", "path"}


class Page(HTMLParser):
    """What a page holds; fails where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self.sections.append(dict(attrs)["id"] or "")
        if tag not in VOID or (tag not in {"meta", "br"} and not self.is_alone()):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def is_alone(self) -> bool:
        return (self.get_starttag_text() or "").endswith("/>")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    done = ckptkit.report(run)
    assert done.path == run / "report.html"
    assert done.nbytes == done.path.stat().st_size < 200_000
    assert done.checkpoint == run / "ckpt-60"
    return Page(done.path.read_text())


def test_every_section_is_there(page: Page) -> None:
    assert page.sections == ["training", "checkpoints", "shards", "largest", "norms", "settings"]
    text = " ".join(page.texts)
    for words in ("model tiny", "3 complete of 4", "latest checkpoint: ckpt-60", "written by 3 ranks", "unfinished"):
        assert words in text
    for words in ("Went back to step 41", "Skipped 1 line without metrics", "not finite at 1 step", "of 80", "pinned"):
        assert words in text


def test_nothing_is_fetched_or_run(page: Page) -> None:
    names = {tag for tag, _ in page.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "image", "use", "form", "base"}
    for _, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href", "xlink:href")}
    policy = next(given for tag, given in page.elements if given.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert not re.search(r"url\(|@import", "".join(page.texts))


def test_hostile_names_are_text(page: Page) -> None:
    assert any(HOSTILE in text for text in page.texts)


def test_every_picture_says_what_it_is(page: Page) -> None:
    pictures = [given for tag, given in page.elements if tag == "svg"]
    assert len(pictures) == 4 + 2 + 2 + 2  # the time line, the map and the norms also for a phone
    assert all(given["role"] == "img" and given["aria-label"] for given in pictures)


def test_norms_are_those_of_the_tensors(page: Page) -> None:
    for layer in range(LAYERS):
        assert f"layers.*.attn.weight, layer {layer}: {8 * (1 + layer)}" in page.texts


def test_without_reading_tensors(run: Path, tmp_path: Path) -> None:
    done = report(run, tmp_path / "fast.html", fast=True)
    assert Page(done.path.read_text()).sections == ["training", "checkpoints", "shards", "largest", "settings"]


def test_progress_comes_to_its_end(run: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    report(run, tmp_path / "out.html", progress=lambda nbytes, total: told.append((nbytes, total)))
    assert sum(nbytes for nbytes, _ in told) == told[-1][1] > 2048


def test_an_earlier_report_is_replaced_and_nothing_else(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    report(run, out, fast=True)
    out.write_text(out.read_text() + "<!-- old -->")
    report(run, out, fast=True)
    assert "<!-- old -->" not in out.read_text()
    out.write_text("<p>mine</p>")
    with pytest.raises(Occupied):
        report(run, out, fast=True)
    assert out.read_text() == "<p>mine</p>"
    report(run, out, fast=True, overwrite=True)
    assert out.read_text().startswith("<!doctype html>")
    (tmp_path / "link.html").symlink_to(out)
    with pytest.raises(Unsafe):
        report(run, tmp_path / "link.html", fast=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out.html", "link.html"}


def test_a_run_without_checkpoints_has_its_curves(run: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    done = report(tmp_path)
    assert done.checkpoint is None
    assert Page(done.path.read_text()).sections == ["training"]


def test_one_checkpoint_alone(run: Path, produce: Produce, tmp_path: Path) -> None:
    with pytest.raises(Usage, match="not a run"):
        report(run / "ckpt-60")
    root = produce(producers.hf_alone).root
    done = report(root, tmp_path / "out.html")
    assert done.checkpoint == root
    assert Page(done.path.read_text()).sections == ["checkpoints", "shards", "largest", "norms"]


def test_a_trainers_state_is_a_source(run: Path, tmp_path: Path, produce: Produce) -> None:
    root = tmp_path / "checkpoint-8"
    root.mkdir()
    for file in produce(producers.hf_alone).root.iterdir():
        (root / file.name).write_bytes(file.read_bytes())
    entries = [{"step": i, "loss": 9.0 - i, "learning_rate": 1e-3, "epoch": 0.1} for i in (2, 4, 6)]
    log = [*entries, {"step": 6, "eval_loss": 4.0}, {"step": 6, "train_runtime": 1.0}, {"epoch": 1}]
    (root / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    text = report(tmp_path, tmp_path / "out.html").path.read_text()
    assert "From checkpoint-8/trainer_state.json" in text
    for words in ("loss 3", "eval loss 4", "Learning rate"):
        assert words in text


def test_metrics_of_checkpoints_are_the_last_source(run: Path) -> None:
    listed = ckptkit.list_run(run).checkpoints
    found = read_history(run / "ckpt-20", listed)
    assert [one.first for one in found.series["loss"].stretches] == [20, 40, 50, 60]


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"\n\n\n",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"step": 1e999, "loss": 1}\n{"step": "2"}\n{"step": true}\n[1]\nnull\n',
        b'{"step": ' + b"9" * 5000 + b"}\n",
        b'{"step": ' + b"9" * 400 + b', "loss": 1}\n',
        b'{"step": 1, "loss": ' + b"9" * 400 + b"}\n",
        b"x" * 3_000_000 + b"\n",
        b'{"step": 1, "loss": 2.0}',
    ],
    ids=["empty", "newlines", "bytes", "nested", "kinds", "digits", "far", "large", "one line", "unfinished"],
)
def test_broken_logs_are_survived(lines: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    found = read_metrics_jsonl(tmp_path / "metrics.jsonl")
    assert all(not series.stretches for series in found.series.values())
    good = b'{"step": 3, "loss": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(lines + b"\n" + good)
    assert read_metrics_jsonl(tmp_path / "metrics.jsonl").series["loss"].latest == 2.0


def test_lines_across_blocks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_BLOCK", 37)
    lines = [json.dumps({"step": step, "loss": step / 7}) + "\n" for step in range(200)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    found = read_metrics_jsonl(tmp_path / "metrics.jsonl")
    assert found.skipped == 0
    assert len(found.series["loss"].stretches) == 200


def test_names_without_end_are_not_kept(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, f"metric{step}": 1.0}) + "\n" for step in range(1000)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert len(read_metrics_jsonl(tmp_path / "metrics.jsonl").series) == 64


def test_nothing_to_tell_of(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        report(tmp_path)
    with pytest.raises(NotACheckpoint):
        report(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_are_no_toml(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 2.0}\n')
    (tmp_path / "train.toml").write_text("= 3")
    with pytest.raises(Corrupt, match="TOML"):
        report(tmp_path)
