from __future__ import annotations

import hashlib

import pytest
from pydantic import ValidationError

from kits.manifests import manifest_of, shard
from swarm_shared.base.errors import FrameError, SignatureError
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import (
    MAX_MANIFEST_BYTES,
    open_manifest,
    run_id_of,
    sign_manifest,
)
from swarm_shared.run.manifest import CodecsConfig, LimitsConfig, Manifest
from swarm_shared.run.model_config import preset

ORGANISER = Identity.from_seed(b"o" * 32)
STRANGER = Identity.from_seed(b"s" * 32)


def signable(shards: int = 1, merkle_root: str = "0" * 64, **changes: object) -> Manifest:
    names = [*(f"train-{n:05d}" for n in range(shards)), "heldout-00000"]
    values: dict[str, object] = {
        "organiser": ORGANISER.peer_id,
        "model": preset("tiny").model,
        "data": {
            "shards": tuple(shard(name, 64 * 2**20, merkle_root) for name in names),
            "mirrors": ("https://example.org/a/rather/long/folder",),
            "unigram_entropy_nats": 3.1415926535897931,
        },
        "training": {"steps": 3, "sequences_per_microbatch": 1, "seed": 2**53 - 1},
        "optimizer": {"learning_rate": 0.1 + 0.2},
    }
    return manifest_of(**(values | changes))


def test_what_the_organiser_signed_is_what_a_volunteer_reads():
    manifest = signable()
    assert open_manifest(sign_manifest(ORGANISER, manifest), ORGANISER.peer_id) == manifest


def test_a_manifest_of_ten_thousand_shards_fits():
    manifest = signable(shards=10_000)
    envelope = sign_manifest(ORGANISER, manifest)
    assert len(envelope) <= MAX_MANIFEST_BYTES
    assert open_manifest(envelope, ORGANISER.peer_id) == manifest


def test_a_manifest_signed_by_somebody_else_is_refused():
    forged = sign_manifest(STRANGER, signable(organiser=STRANGER.peer_id))
    with pytest.raises(SignatureError):
        open_manifest(forged, ORGANISER.peer_id)


def test_a_changed_manifest_is_refused():
    envelope = sign_manifest(ORGANISER, signable())
    assert envelope.count(b'"steps":3') == 1
    with pytest.raises(SignatureError):
        open_manifest(envelope.replace(b'"steps":3', b'"steps":9'), ORGANISER.peer_id)


def test_something_too_long_to_be_a_manifest_is_refused_unread():
    with pytest.raises(FrameError, match="longer"):
        open_manifest(bytes(MAX_MANIFEST_BYTES + 1), ORGANISER.peer_id)


def test_organiser_name_model_data_and_seed_name_the_run():
    training = signable().training
    others = [
        signable(),
        signable(organiser=STRANGER.peer_id),
        signable(name="other"),
        signable(model=preset("tiny").model.model_copy(update={"rope_theta": 5.0})),
        signable(merkle_root="1" * 64),
        signable(training=training.model_copy(update={"seed": 1})),
    ]
    ids = [run_id_of(manifest) for manifest in others]
    assert len(set(ids)) == len(ids)
    assert all(len(run_id) == 64 for run_id in ids)


def test_an_invite_outlives_a_longer_run_other_limits_and_other_addresses():
    one = signable()
    other = signable(
        training=one.training.model_copy(update={"steps": 99}),
        limits=LimitsConfig(heartbeat_seconds=2),
        data=one.data.model_copy(update={"mirrors": ()}),
    )
    assert run_id_of(one) == run_id_of(other)


def test_a_runs_id_is_the_hash_of_its_canonical_json():
    manifest = signable(organiser="somebody")
    model = manifest.model.model_dump()
    # By hand, in the order and with the numbers of RFC 8785.
    text = (
        '{"data":{"shards":['
        + ",".join(
            f'{{"merkle_root":"{shard.merkle_root}","name":"{shard.name}",'
            f'"split":"{shard.split}","tokens":67108864}}'
            for shard in manifest.data.shards
        )
        + '],"token_bytes":1,"tokenizer":"bytes","tokenizer_sha256":null,'
        '"unigram_entropy_nats":3.141592653589793},'
        '"model":{"adapters":{"alpha":32,"rank":0,"targets":["q_proj","k_proj","v_proj","o_proj",'
        '"gate_proj","up_proj","down_proj"]},'
        '"attention_bias":"none","attention_head_size":0,"bottleneck_size":0,'
        f'"bottlenecks":[],"heads":{model["heads"]},'
        f'"hidden_size":{model["hidden_size"]},"intermediate_size":{model["intermediate_size"]},'
        f'"key_value_heads":{model["key_value_heads"]},"layers":{model["layers"]},'
        '"norm_epsilon":0.00001,"query_key_norm":false,"rope_scaling":{'
        '"attention_factor":1,"factor":1,'
        '"high_frequency_factor":4,"kind":"none","low_frequency_factor":1,"original_length":8192},'
        f'"rope_theta":10000,"sequence_length":{model["sequence_length"]},'
        '"tie_embeddings":false,'
        f'"vocabulary_size":{model["vocabulary_size"]}}},'
        '"name":"test","organiser":"somebody","seed":9007199254740991}'
    )
    assert run_id_of(manifest) == hashlib.sha256(f"swarmtrain-run-1{text}".encode()).hexdigest()


def test_a_model_with_bottlenecks_is_another_run():
    manifest = signable()
    words = manifest.model_dump()
    words["stages"] = [{"first_layer": 0, "end_layer": 2}, {"first_layer": 2, "end_layer": 4}]
    words["model"] |= {"bottleneck_size": 16, "bottlenecks": (2,)}
    narrow = run_id_of(Manifest.model_validate(words))
    words["model"]["bottleneck_size"] = 32
    assert len({run_id_of(manifest), narrow, run_id_of(Manifest.model_validate(words))}) == 3


def test_a_manifest_that_names_no_codecs_has_none():
    none = CodecsConfig(activation="none", gradient="none", average="none")
    assert signable().codecs == none


@pytest.mark.parametrize(
    "codecs",
    [
        {"average": "int4"},
        {"activation": "topk"},
        {"gradient": "zip"},
        {"activation": "int8", "border": 1},
    ],
)
def test_codecs_that_there_are_not_are_refused(codecs: dict[str, object]):
    with pytest.raises(ValidationError):
        signable(codecs=codecs)
