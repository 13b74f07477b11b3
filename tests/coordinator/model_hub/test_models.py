"""Models to a hub and back, by the command line, against a hub on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load

from kits.coordinator import run as run_kit
from kits.coordinator.commands import complaint
from kits.coordinator.shell_world import make_run
from kits.hub.fake_hub import TOKEN, FakeHub, FakeRepository, fake_hub
from kits.runs.stage_files import put_model
from swarm_coordinator.cli.main import run
from swarm_coordinator.durability.run_files import load_manifest, load_settings
from swarm_coordinator.model_hub.models import HubModel
from swarm_coordinator.offline.merged_stages import merge_stages
from swarm_coordinator.run_creation.initialise import refresh_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_shared.identity.signed_manifest import run_id_of

NAME = "ada/tiny-swarm"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch, tmp_path / "home") as served:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of two steps, with a checkpoint of a model whose parameters all differ."""
    folder = make_run(
        tmp_path / "run", model__layers=2, model__hidden_size=32, model__intermediate_size=48,
        model__heads=2, model__key_value_heads=1,
    )  # fmt: skip
    run_kit.one_start(folder, run_kit.step(1), run_kit.step(2), put_model(folder, 2))
    return folder


def push(folder: RunFolder, *options: str) -> int:
    out = folder.path.parent / "out"
    return run(["export", str(folder.path), str(out), "--push", NAME, *options])


def begin(folder: RunFolder, given: str, name: str = "next") -> int:
    text = load_settings(folder).data.source
    return run(
        ["init", str(folder.path.parent / name), "--from", given, "--data", text, "--stages=2"]
    )


def trained(folder: RunFolder) -> dict[str, torch.Tensor]:
    stages = sorted((folder.path.parent / "states").iterdir())
    return merge_stages(load_manifest(folder).model, stages)


def test_a_pushed_model_is_where_another_run_begins(
    folder: RunFolder, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(folder, "--shard-size=30kB") == 0
    repository = hub.repositories[NAME]
    assert f"{hub.url}/{NAME}/commit/{repository.head}" in capsys.readouterr().out
    assert sum(name.endswith(".safetensors") for name in repository.files) >= 3
    repository.commits.append(
        {**repository.files, "modeling.py": b"print()", "pytorch_model.bin": b"pickle",
         "consolidated.safetensors": b"twice"}
    )  # fmt: skip
    assert begin(folder, NAME) == 0
    assert f"downloading {NAME} at {repository.head[:12]}" in capsys.readouterr().out
    fetched = {path.rsplit("/", 1)[1] for path in hub.requests if path.startswith("GET /ada")}
    assert fetched == {
        name for name in repository.files
        if name in ("config.json", "tokenizer.json") or name.startswith("model")
    } - {"modeling.py"}  # fmt: skip
    following = RunFolder.open(folder.path.parent / "next")
    manifest = load_manifest(following)
    assert manifest.base_model == NAME == refresh_manifest(following).base_model
    assert run_id_of(manifest) == run_id_of(manifest.model_copy(update={"base_model": ""}))
    begun = merge_stages(manifest.model, initial_files(following, manifest))
    assert begun.keys() == trained(folder).keys()
    assert all(torch.equal(begun[name], tensor) for name, tensor in trained(folder).items())
    assert manifest.data.tokenizer == "bytes"


def test_a_smaller_push_leaves_no_file_of_the_former_model(folder: RunFolder, hub: FakeHub) -> None:
    assert push(folder, "--shard-size=30kB") == 0
    (folder.path.parent / "out" / "private-notes.txt").write_text("stay here")
    hub.repositories[NAME].files["chat_template.jinja"] = b"of the organiser"
    assert push(folder, "--dtype=bfloat16") == 0
    files = hub.repositories[NAME].files
    assert set(files) == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"
    stored = load(files["model.safetensors"])
    assert all(torch.equal(stored[n], t.to(torch.bfloat16)) for n, t in trained(folder).items())


def test_an_older_revision_and_what_is_in_the_cache_can_be_taken(
    folder: RunFolder, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push(folder) == 0
    repository = hub.repositories[NAME]
    first = repository.head
    repository.commits.append({"config.json": b"{}"})
    assert begin(folder, NAME, "newest") == 5
    assert begin(folder, f"{NAME}@{first}") == 0
    downloads = len(hub.requests)
    assert begin(folder, f"{NAME}@{first}", "again") == 0
    assert not any("/resolve/" in request for request in hub.requests[downloads:])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert begin(folder, f"{NAME}@{first}", "offline") == 0


@pytest.mark.parametrize("name", ["*", "[!a]*.safetensors", "weights/pytorch_model.bin", ".."])
def test_an_index_downloads_nothing_but_the_safetensors_files_that_it_names(
    folder: RunFolder, hub: FakeHub, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A name in an index becomes a pattern of files, and a model's repository may have any."""
    assert push(folder, "--shard-size=30kB") == 0
    repository = hub.repositories[NAME]
    index = "model.safetensors.index.json"
    tensors = json.loads(repository.files[index])["weight_map"]
    wrong = json.dumps({"weight_map": dict.fromkeys(tensors, name)}).encode()
    repository.commits.append({**repository.files, index: wrong, "pytorch_model.bin": b"pickle"})
    capsys.readouterr()
    assert begin(folder, NAME) == 5
    said = complaint(capsys)
    fetched = {path.rsplit("/", 1)[1] for path in hub.requests if path.startswith("GET /ada")}
    assert fetched <= {"config.json", "tokenizer.json", index}
    assert f"{name!r}, which is no safetensors file" in said


def test_a_private_model_is_not_pushed_to_a_public_repository(
    folder: RunFolder, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(folder, "--private") == 0
    assert hub.repositories[NAME].private
    hub.repositories[NAME] = FakeRepository()
    capsys.readouterr()
    assert push(folder, "--private") == 2
    assert "exists and is public" in complaint(capsys)
    assert hub.repositories[NAME].files == {}


@pytest.mark.parametrize(
    ("rights", "said"),
    [("no token", "Invalid credentials"), ("reader", "don't have the rights to write")],
)
def test_a_refused_push_is_one_sentence_and_the_folder_stays(
    rights: str, said: str, folder: RunFolder, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if rights == "no token":
        monkeypatch.delenv("HF_TOKEN")
    hub.may_write = False
    assert push(folder) == 3
    error = complaint(capsys)
    assert said in error
    assert "hf auth login" in error
    assert (folder.path.parent / "out" / "config.json").exists()


def test_what_a_hub_does_not_give_out_is_one_sentence(
    folder: RunFolder, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    gated = {"config.json": b"{}", "model.safetensors": b""}
    hub.repositories["ada/gated"] = FakeRepository(gated=True, commits=[gated])
    gpt2 = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"\0" * 1000}
    hub.repositories["ada/other"] = FakeRepository(commits=[gpt2])
    hub.repositories["ada/pickle"] = FakeRepository(commits=[{"pytorch_model.bin": b""}])
    for given, code, said in (
        ("ada/missing", 5, "neither a folder ada/missing nor a model ada/missing at"),
        ("ada/gated", 5, "given out on request only; ask for it at"),
        ("ada/other@v2", 5, "has no revision v2"),
        ("ada/other", 5, "config.json describes no model"),
        ("ada/pickle", 5, "there is no "),
    ):
        capsys.readouterr()
        assert begin(folder, given) == code, given
        assert said in complaint(capsys)
    # A model that cannot be trained is found before its parameters are downloaded.
    assert not any(path.endswith(("model.safetensors", ".bin")) for path in hub.requests)
    assert not (folder.path.parent / "next").exists()


def test_without_a_network_it_is_one_sentence(
    folder: RunFolder, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for code in (begin(folder, NAME), push(folder)):
        assert code == 8
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    capsys.readouterr()
    assert begin(folder, NAME) == 8
    assert "http://127.0.0.1:1 cannot be reached" in complaint(capsys)
    assert push(folder) == 8
    assert "http://127.0.0.1:1 cannot be reached" in complaint(capsys)


def test_a_missing_package_is_named_before_anything_is_done(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert (push(folder), begin(folder, NAME)) == (3, 3)
    assert capsys.readouterr().err.count("pip install 'swarmtrain[hf]'") == 2
    assert not (folder.path.parent / "out").exists()


@pytest.mark.parametrize("name", ["ada", "ada/b/c", "ada/..", "ada/x@v1", "-ada/x", "ada/x.git"])
def test_a_wrong_name_is_refused_before_anything_is_done(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(tmp_path), str(tmp_path / "out"), "--push", name]) == 2
    assert "--push needs the form ORG/NAME" in complaint(capsys)


def test_names_of_models() -> None:
    assert HubModel.parse("ada/x-1.5_b") == HubModel("ada/x-1.5_b")
    assert HubModel.parse("ada/x@refs/pr/1") == HubModel("ada/x", "refs/pr/1")
    for text in ("ada", "./ada", "../ada/x", "/ada/x", "ada/x/", "~/x", "ada/a--b", "ada\\x", ""):
        assert HubModel.parse(text) is None, text


def test_a_folder_comes_before_a_model_of_the_same_name(
    folder: RunFolder, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder.path.parent)
    Path(NAME).mkdir(parents=True)
    assert begin(folder, NAME) == 5
    assert f"there is no {folder.path.parent / NAME / 'config.json'}" in complaint(capsys)
    assert hub.requests == []
