"""The report in a real browser: light and dark, narrow and wide. It fetches nothing, and everything can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.plugins.report.report import report
from ckptkit.plugins.report.shard_map import write_shard_map
from tests.plugins.report.chromium import find_chromium, visit
from tests.plugins.report.runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_chromium() is None, reason="needs chromium")]

PROBE = Path(__file__).with_name("probe.js")
FRAMES = [(scheme, width) for scheme in ("light", "dark") for width in (390, 1280)]
SECTIONS = ["training", "checkpoints", "shards", "largest", "norms", "settings"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("browser") / "run")


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return report(run).path


@pytest.fixture(scope="module")
def told(page: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe measured of the page, in frames of both schemes and of a phone's and a screen's width."""
    home = tmp_path_factory.mktemp("frames")
    frames = "".join(
        f'<iframe name="{scheme}-{width}" srcdoc="{escape(page.read_text())}" '
        f'style="color-scheme:{scheme};width:{width}px;height:9000px;border:0"></iframe>'
        for scheme, width in FRAMES
    )
    wrapper = home / "frames.html"
    wrapper.write_text(f'<!doctype html><script>{PROBE.read_text()}</script>{frames}<pre id="told"></pre>')
    seen = visit(wrapper, home / "profile")
    assert seen.console == []
    found: dict[str, Any] = json.loads(seen.find("told"))
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_the_reader_likes_it(told: dict[str, Any], scheme: str) -> None:
    for width in (390, 1280):
        red = int(told[f"{scheme}-{width}"]["ground"].strip("rgba()").split(",")[0])
        assert (red > 200) == (scheme == "light")


@pytest.mark.parametrize(("scheme", "width"), FRAMES)
def test_every_section_shows_and_nothing_sticks_out(told: dict[str, Any], scheme: str, width: int) -> None:
    found = told[f"{scheme}-{width}"]
    assert found["title"] == "run"
    assert found["width"] == width
    assert found["scrolls"] <= width
    assert [name for name, _, _ in found["sections"]] == SECTIONS
    assert all(0 < wide <= width and tall > 20 for _, wide, tall in found["sections"])
    assert len(found["pictures"]) == 7
    assert all(height > 80 for height in found["pictures"])
    assert found["outside"] == []
    assert found["cut"] == 0


@pytest.mark.parametrize(("scheme", "width"), FRAMES)
def test_all_text_can_be_read(told: dict[str, Any], scheme: str, width: int) -> None:
    found = told[f"{scheme}-{width}"]
    assert found["texts"] > (150 if width == 390 else 250)
    assert found["faint"] == []
    assert found["collisions"] == []


def test_it_opens_without_a_complaint(page: Path, run: Path, tmp_path: Path) -> None:
    seen = visit(page, tmp_path / "profile")
    assert seen.console == []
    assert "<title>run</title>" in seen.document
    write_shard_map(open_layout(run / "ckpt-60"), tmp_path / "map.svg")
    drawn = visit(tmp_path / "map.svg", tmp_path / "profile")
    assert drawn.console == []
    assert "Bytes by rank" in drawn.document


@dataclass
class Server:
    """What was asked of a web server."""

    port: int = 0
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    seen = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        seen.port = listening.server_port
        thread = Thread(target=listening.serve_forever)
        thread.start()
        yield seen
        listening.shutdown()
        thread.join()


def test_its_policy_lets_nothing_out(page: Path, server: Server, tmp_path: Path) -> None:
    """Even if something got into the page: an image, a script, a style sheet. Without the policy they are asked for."""
    at = f"http://127.0.0.1:{server.port}"
    attack = (
        f'<img src="{at}/image"><script>new Image().src="{at}/script";document.title="caught"</script>'
        f'<link rel="stylesheet" href="{at}/style">'
    )
    text = page.read_text().replace("<main>", f"<main>{attack}")
    held, free = tmp_path / "held.html", tmp_path / "free.html"
    held.write_text(text)
    seen = visit(held, tmp_path / "profile")
    assert server.asked == []
    assert len(seen.console) >= 3
    assert "<title>run</title>" in seen.document
    free.write_text(text.replace('http-equiv="Content-Security-Policy"', ""))
    assert "<title>caught</title>" in visit(free, tmp_path / "profile").document
    assert {"/image", "/script", "/style"} <= set(server.asked)
