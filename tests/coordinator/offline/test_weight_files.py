"""Exports in several files and other dtypes, as `transformers` reads them."""

from __future__ import annotations

import json
import os
import weakref

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from kits.runs.stage_files import small_manifest, write_stage_files
from swarm_coordinator.offline import hf_export
from swarm_coordinator.offline.hf_export import check_out, export_huggingface
from swarm_coordinator.offline.merged_stages import MergedStages, merge_stages, open_stages
from swarm_coordinator.offline.weight_files import ExportDtype, plan_shards, write_weights
from swarm_shared.base.errors import StorageError, UsageError
from swarm_shared.model.initialise import build_whole
from swarm_shared.model.state import open_state, save_state
from swarm_shared.run.manifest import Manifest

INDEX = "model.safetensors.index.json"
NO_TOKENIZER = Path("nowhere")
TOKENS = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(3))


def exported(
    described: Manifest, folder: Path, dtype: ExportDtype = "float32", shard_bytes: int = 60_000
) -> Path:
    files = write_stage_files(described, folder / "stages")
    export_huggingface(described, files, NO_TOKENIZER, folder / "out", dtype, shard_bytes)
    return folder / "out"


def weights_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("model")}


@pytest.mark.parametrize(
    ("sizes", "most", "shards"),
    [
        ([3, 3, 3], 9, [[0, 1, 2]]),
        ([3, 3, 3], 8, [[0, 1], [2]]),
        ([3, 20, 3], 8, [[0], [1], [2]]),
        ([20], 8, [[0]]),
        ([4, 4, 4, 4], 8, [[0, 1], [2, 3]]),
    ],
)
def test_files_are_filled_in_order_and_a_tensor_is_never_divided(
    sizes: list[int], most: int, shards: list[list[int]]
) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    assert plan_shards(named, most) == [[str(number) for number in one] for one in shards]


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_logits_from_several_files(
    tmp_path: Path, tied: bool
) -> None:
    described = small_manifest(tie_embeddings=tied)
    out = exported(described, tmp_path)
    index = json.loads((out / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count >= 3
    assert files == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert weights_in(out) == {*files, INDEX}
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    merged = merge_stages(described.model, sorted((tmp_path / "stages").iterdir()))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in merged.values())
    theirs, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = build_whole(described)
    ours.load_state_dict(merged)
    with torch.no_grad():
        assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_another_dtype_is_the_rounded_model(
    tmp_path: Path, dtype: ExportDtype, tolerance: float
) -> None:
    described = small_manifest()
    out = exported(described, tmp_path, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert str(theirs.dtype) == f"torch.{dtype}"
    merged = merge_stages(described.model, sorted((tmp_path / "stages").iterdir()))
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, merged[name].to(theirs.dtype)), name
    ours = build_whole(described)
    ours.load_state_dict(merged)
    with torch.no_grad():
        wanted, logits = ours(TOKENS), theirs.float()(TOKENS).logits
    # Each of some ten matrices on the way adds its rounding.
    assert (wanted - logits).norm() <= 10 * tolerance * wanted.norm()
    assert not torch.equal(wanted, logits)


def test_an_earlier_export_leaves_no_file_behind(tmp_path: Path) -> None:
    described = small_manifest()
    out = exported(described, tmp_path)
    (out / "notes.txt").write_text("of the organiser")
    assert len(weights_in(out)) > 3
    check_out(out)
    exported(described, tmp_path, "bfloat16", 10**9)
    assert weights_in(out) == {"model.safetensors"}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    exported(described, tmp_path)
    assert "model.safetensors" not in weights_in(out)
    assert (out / "notes.txt").exists()


def test_an_interrupted_export_is_no_model_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = small_manifest()
    out = exported(described, tmp_path)

    def full(*_: object) -> None:
        write_weights(*given[-1][:2], "float32", 60_000)
        raise StorageError("the disk is full")

    given: list[tuple[MergedStages, Path]] = []
    monkeypatch.setattr(
        hf_export, "write_weights", lambda merged, out, *_: (given.append((merged, out)), full())
    )
    with pytest.raises(StorageError, match="disk is full"):
        exported(described, tmp_path)
    assert not (out / "config.json").exists()
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(out)
    check_out(out)
    monkeypatch.undo()
    exported(described, tmp_path)
    assert (out / "config.json").exists()


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("of another project")
    with pytest.raises(UsageError, match="holds files other than"):
        check_out(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    check_out(tmp_path)
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="holds files other than"):
        check_out(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        check_out(tmp_path / "thesis.txt")


def test_a_value_that_float16_cannot_hold_is_refused_and_an_earlier_export_is_kept(
    tmp_path: Path,
) -> None:
    described = small_manifest()
    files = write_stage_files(described, tmp_path / "stages")
    tensors = {name: tensor.clone() for name, tensor in open_state(files[1]).tensors.items()}
    tensors["model.norm.weight"][5] = -70_000.0
    save_state(files[1], tensors, {})
    out = tmp_path / "out"
    export_huggingface(described, files, NO_TOKENIZER, out, "bfloat16")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(StorageError, match=r"model\.norm\.weight holds 70000, and float16 ends"):
        export_huggingface(described, files, NO_TOKENIZER, out, "float16")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    described = small_manifest()
    merged = open_stages(described.model, write_stage_files(described, tmp_path / "stages"))
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched:
        shapes = merged.shapes

        def read(self, name: str) -> torch.Tensor:
            assert not any(reference() is not None for reference in alive)
            tensor = merged.read(name)
            alive.append(weakref.ref(tensor))
            return tensor

    (tmp_path / "out").mkdir()
    write_weights(cast(MergedStages, Watched()), tmp_path / "out", "float32", 60_000)
    assert len(alive) == len(merged.shapes)
