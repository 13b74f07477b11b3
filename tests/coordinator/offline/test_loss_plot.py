from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from swarm_coordinator.offline.loss_plot import (
    DOTS_PER_INCH,
    HEIGHT_INCHES,
    SERIES_COLOR,
    WIDTH_INCHES,
    draw_loss_curve,
)
from swarm_shared.base.errors import StorageError

STEPS = list(range(1, 31))
LOSSES = [5.5 * math.exp(-step / 12) + 1.5 for step in STEPS]


def draw(path: Path, **options: Any) -> np.ndarray:
    draw_loss_curve(path, "a run", STEPS, LOSSES, **options)
    return matplotlib.image.imread(path)[:, :, :3]


def has_color(image: np.ndarray, color: str) -> np.ndarray:
    """Which pixels have exactly that colour."""
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.abs(image - wanted).max(axis=2) < 0.01


def test_the_curve_is_a_png_of_the_stated_size(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "loss.png"
    draw(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (
        int(WIDTH_INCHES * DOTS_PER_INCH),
        int(HEIGHT_INCHES * DOTS_PER_INCH),
    )


def test_a_falling_loss_is_drawn_falling_from_left_to_right(tmp_path: Path) -> None:
    rows, columns = np.nonzero(has_color(draw(tmp_path / "loss.png"), SERIES_COLOR))
    left = rows[columns == columns.min()].mean()
    right = rows[columns == columns.max()].mean()
    assert left + 100 < right  # rows count from the top
    assert columns.max() - columns.min() > 500


def test_the_texts_of_events_cover_nothing_of_a_falling_curve(tmp_path: Path) -> None:
    def curve_pixels(name: str, events: dict[int, str]) -> int:
        return int(has_color(draw(tmp_path / name, events=events), SERIES_COLOR).sum())

    texts = {5: "volunteer-2 is killed after step 4", 7: "volunteer-5 computes from step 7 on"}
    lines_only = curve_pixels("lines.png", dict.fromkeys(texts, ""))
    assert curve_pixels("texts.png", texts) == lines_only > 1000


def test_the_reference_line_and_the_heldout_mark_change_the_picture(tmp_path: Path) -> None:
    bare = draw(tmp_path / "bare.png")
    line = draw(tmp_path / "line.png", unigram_entropy=3.4)
    both = draw(tmp_path / "both.png", unigram_entropy=3.4, heldout_loss=2.0)
    assert np.abs(bare - line).max() > 0.1
    assert np.abs(line - both).max() > 0.1


def test_an_event_is_a_vertical_line_at_its_step(tmp_path: Path) -> None:
    bare = draw(tmp_path / "bare.png")
    path = tmp_path / "event.png"
    draw_loss_curve(path, "a run", STEPS, LOSSES, events={15: "a kill"})
    changed = np.abs(matplotlib.image.imread(path)[:, :, :3] - bare).max(axis=2) > 0.1
    columns = np.nonzero(changed.sum(axis=0) > HEIGHT_INCHES * DOTS_PER_INCH / 4)[0]
    curve = np.nonzero(has_color(bare, SERIES_COLOR))[1]
    middle = (columns.mean() - curve.min()) / (curve.max() - curve.min())
    assert middle == pytest.approx(14 / 29, abs=0.01)


def test_a_single_step_is_visible(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    draw_loss_curve(path, "a run", [1], [5.5])
    assert has_color(matplotlib.image.imread(path)[:, :, :3], SERIES_COLOR).sum() > 10


def test_a_folder_that_cannot_be_written_gives_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="loss curve could not be written"):
        draw_loss_curve(tmp_path / "file" / "loss.png", "a run", STEPS, LOSSES)
