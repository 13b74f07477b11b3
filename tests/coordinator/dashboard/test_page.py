"""The dashboard in a real browser: on a phone, at a desk, in the dark, by keyboard, under attack.

Pictures of it are written to the folder that SWARM_PICTURES names, for people to look at.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kits.coordinator import run as run_kit
from kits.coordinator.browser import Page, browser
from kits.coordinator.http_server import (
    ANNA,
    BERT,
    HOSTILE,
    Client,
    pages_of,
    peer,
    run_with_pages,
    write_status,
)
from swarm_coordinator.core.events import Note
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.records import PeerSeen

pytestmark = pytest.mark.process

SAMPLE = "def f(x):\n    return '<b>bold</b>'"
EVALUATION = {"version": 3, "heldout_loss": 2.5, "tokens": 64, "sample": SAMPLE}
LIVE = "document.querySelector('#live').textContent === 'live'"
PEERS = [
    peer(ANNA, 0, name="anna", version=59),
    peer(
        BERT, 1, name=HOSTILE, version=59, flagged_times=2, flagged_reason="its gradient held a NaN"
    ),
]
DRAWN = "document.querySelector('#loss polyline') && document.querySelector('#stages li')"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = run_with_pages(tmp_path / "run")
    run_kit.one_start(
        folder, PeerSeen(run_kit.ANNA, HOSTILE), PeerSeen(run_kit.BERT, "bert" * 15),
        *(run_kit.step(number) for number in range(6, 60)),
    )  # fmt: skip
    write_status(folder, version=59, steps=90, peers=PEERS, evaluation=EVALUATION)
    return folder


@asynccontextmanager
async def opened(
    folder: RunFolder, tmp_path: Path, width: int, *, token: bool = False, dark: bool = False
) -> AsyncIterator[tuple[Page, Client]]:
    async with pages_of(folder) as client, browser(tmp_path / "profile") as page:
        fragment = f"#token={client.token}" if token else ""
        await page.open(client.address.url + fragment, width, dark=dark)
        await page.until(DRAWN)
        await page.until(LIVE)
        yield page, client
        assert page.complaints == []
        assert all(url.startswith(client.address.url) for url in page.requested)


async def keep_picture(page: Page, name: str) -> None:
    folder = os.environ.get("SWARM_PICTURES")
    if folder:
        await page.picture(Path(folder) / f"{name}.png")


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_it_fits_every_screen(
    folder: RunFolder, tmp_path: Path, width: int, dark: bool
) -> None:
    async with opened(folder, tmp_path, width, token=True, dark=dark) as (page, _):
        await page.until("document.querySelector('#full-peers tr')")
        await keep_picture(page, f"{width}-{'dark' if dark else 'light'}")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert (
            await page.evaluate("document.querySelector('#health-state').textContent") == "healthy"
        )
        assert (await page.evaluate("document.title")).startswith("healthy: ")
        contrast = await page.evaluate(CONTRAST)
        assert contrast == []


async def test_a_stage_shows_its_computing_time_and_its_idle_share(
    folder: RunFolder, tmp_path: Path
) -> None:
    async with opened(folder, tmp_path, 1280) as (page, _):
        stages = await page.evaluate("document.querySelector('#stages').innerText")
        assert "a microbatch takes" in stages
        assert "idle for 50 % of the time" in stages
        tiles = await page.evaluate("document.querySelector('#tiles').innerText")
        assert "Bubble\n30 %" in tiles
        rejected = await page.evaluate("document.querySelector('#rejected').innerText")
        assert rejected == "Rejected since the coordinator started: 3 × not finite."


async def test_what_the_model_writes_is_text_with_its_lines(
    folder: RunFolder, tmp_path: Path
) -> None:
    async with opened(folder, tmp_path, 1280) as (page, _):
        assert await page.evaluate("document.querySelector('#sample-part').hidden") is False
        shown = await page.evaluate("document.querySelector('#sample').innerText")
        assert shown == SAMPLE
        tiles = await page.evaluate("document.querySelector('#tiles').innerText")
        assert "Held-out loss\n2.5000 at step 3" in tiles


async def test_whatever_volunteers_call_themselves_is_text(
    folder: RunFolder, tmp_path: Path
) -> None:
    async with opened(folder, tmp_path, 1280, token=True) as (page, _):
        await page.until("document.querySelector('#full-peers tr')")
        shown = await page.evaluate("document.body.innerText")
        assert "<img src=x onerror=alert(1)>" in shown
        assert await page.evaluate("document.querySelectorAll('img').length") == 1  # the sign


async def test_strangers_see_no_organisers_part_and_the_token_leaves_the_address(
    folder: RunFolder, tmp_path: Path
) -> None:
    async with opened(folder, tmp_path, 1280) as (page, client):
        hidden = "document.querySelector('#organiser').hidden"
        assert await page.evaluate(hidden)
        assert ANNA not in await page.evaluate("document.body.innerText")
        await page.evaluate(f"location.hash = 'token={client.token}'")
        await page.until(f"!{hidden} && document.body.innerText.includes('{ANNA}')")
        assert client.token not in await page.evaluate("location.href")
        assert all(client.token not in url for url in page.requested)
        await page.evaluate("document.querySelector('#forget').click()")
        await page.until(hidden)
        assert BERT not in await page.evaluate("document.body.innerHTML")


async def test_what_happens_is_seen_without_a_reload(folder: RunFolder, tmp_path: Path) -> None:
    async with opened(folder, tmp_path, 1280) as (page, _):
        await trio.to_thread.run_sync(run_kit.one_start, folder, Note("carl was admitted"))
        write_status(folder, version=60, steps=90, peers=[peer(ANNA, 0)])
        await page.until("document.body.innerText.includes('carl was admitted')")
        await page.until("document.querySelector('#health-state').textContent === 'degraded'")
        await page.until("document.querySelector('#progress-text').textContent.includes('60 of')")


async def test_plots_are_read_by_keyboard_and_as_tables(folder: RunFolder, tmp_path: Path) -> None:
    async with opened(folder, tmp_path, 1280) as (page, _):
        label = await page.evaluate(
            "document.querySelector('#loss svg').getAttribute('aria-label')"
        )
        assert "Arrow keys" in label
        await page.evaluate("document.querySelector('#loss svg').focus()")
        output = "document.querySelector('#loss output').textContent"
        await page.press("ArrowRight")
        assert await page.evaluate(output) == "step 1: 3 nats"
        await page.press("End")
        assert (await page.evaluate(output)).startswith("step 59: ")
        await page.press("Escape")
        assert await page.evaluate(output) == ""
        await page.evaluate("document.querySelector('#loss summary').click()")
        await page.until("document.querySelectorAll('#loss tbody tr').length > 10")


async def test_it_has_landmarks_names_and_respects_reduced_motion(
    folder: RunFolder, tmp_path: Path
) -> None:
    async with opened(folder, tmp_path, 1280, token=True) as (page, _):
        for tag in ("header", "main", "footer", "h1"):
            assert await page.evaluate(f"document.querySelectorAll('{tag}').length") == 1
        nameless = await page.evaluate(
            "[...document.querySelectorAll('section, [role], progress, button, svg')].filter("
            "e => !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')"
            " && !e.textContent.trim() && !e.hidden && e.getAttribute('role') !== 'alert')"
            ".map(e => e.outerHTML)"
        )
        assert nameless == []
        await page.do(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-reduced-motion", "value": "reduce"}],
        )
        moving = await page.evaluate(
            "[...document.querySelectorAll('*')].filter(e => "
            "getComputedStyle(e).transitionDuration !== '0s').length"
        )
        assert moving == 0


CONTRAST = """
(() => {
  const light = ([r, g, b]) => {
    const linear = [r, g, b].map((c) => c / 255).map(
      (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest('svg, noscript')) continue;
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([e.outerHTML.slice(0, 80), ratio]);
  }
  return poor;
})()
"""
"""Texts whose contrast is below what WCAG's level AA asks for."""
