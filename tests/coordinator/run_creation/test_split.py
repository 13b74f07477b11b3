from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_coordinator.run_creation.corpus import TextCorpus, TextDocument
from swarm_coordinator.run_creation.split import plan_split, sampled, split_documents
from swarm_coordinator.run_dir.shard_index import DataReport
from swarm_shared.base.errors import DataError


def of_texts(texts: dict[str, str]) -> TextCorpus:
    documents = [TextDocument(name, text) for name, text in texts.items()]
    return TextCorpus("the test's text", lambda: iter(documents))


def both(corpus: TextCorpus, share: float = 0.05, least: int = 1) -> tuple[list[str], list[str]]:
    plan = plan_split(corpus, share, least)
    train = [document.text for document in split_documents(corpus, plan, "train")]
    heldout = [document.text for document in split_documents(corpus, plan, "heldout")]
    return train, heldout


def test_about_a_twentieth_of_many_documents_is_held_out_whole():
    texts = {f"{n}.txt": f"document {n} " * (1 + n % 7) for n in range(1000)}
    train, heldout = both(of_texts(texts))
    assert sorted(train + heldout) == sorted(texts.values())
    share = sum(map(len, heldout)) / sum(map(len, texts.values()))
    assert 0.04 < share < 0.06


def test_the_split_depends_on_names_and_not_on_order():
    texts = {f"{n}.txt": f"document {n} " * 20 for n in range(100)}
    backwards = dict(reversed(texts.items()))
    assert sorted(both(of_texts(texts))[1]) == sorted(both(of_texts(backwards))[1])


def test_a_repeated_document_is_used_once_so_that_none_is_on_both_sides():
    texts = {f"{n}.txt": f"document {n % 50} " * 20 for n in range(500)}
    train, heldout = both(of_texts(texts))
    assert len(train) + len(heldout) == 50
    assert set(train).isdisjoint(heldout)
    assert train
    assert heldout


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=30), st.sampled_from([0.01, 0.05, 0.3]))
@settings(max_examples=200, deadline=None)
def test_both_sides_are_long_enough_and_share_nothing_whatever_the_lengths(
    lengths: list[int], share: float
):
    texts = {f"{n}": f"{n}:" + "x" * length for n, length in enumerate(lengths)}
    least = 100
    if sum(map(len, texts.values())) < 4 * least or max(map(len, texts.values())) < 2 * least:
        return
    train, heldout = both(of_texts(texts), share, least)
    assert sum(map(len, train)) + sum(map(len, heldout)) == sum(map(len, texts.values()))
    assert sum(map(len, train)) >= least
    assert sum(map(len, heldout)) >= least
    assert sum(map(len, heldout)) <= sum(map(len, train))


def test_the_end_of_a_single_document_is_held_out_after_a_line():
    text = "".join(f"line {n} ü\n" for n in range(1000))
    train, heldout = both(of_texts({"a": text}))
    assert train[0] + heldout[0] == text
    assert train[0].endswith("\n")
    assert 0.04 < len(heldout[0]) / len(text) < 0.08


def test_a_single_document_without_lines_is_never_cut_inside_a_character():
    for length in range(100, 110):
        text = "€" * length
        train, heldout = both(of_texts({"a": text}), least=20)
        assert train[0] + heldout[0] == text
        assert train[0]
        assert heldout[0]


def test_a_corpus_that_changes_while_it_is_read_is_noticed():
    texts = {"a": "x" * 100, "b": "y" * 100}
    corpus = TextCorpus("it", lambda: iter([TextDocument(n, t) for n, t in texts.items()]))
    plan = plan_split(corpus, 0.05, 1)
    texts["c"] = "z"
    with pytest.raises(DataError, match="changed while it was read"):
        list(split_documents(corpus, plan, "train"))
    del texts["c"], texts["b"]
    with pytest.raises(DataError, match="changed while it was read"):
        list(split_documents(corpus, plan, "train"))


def test_a_sample_is_about_its_share_and_always_the_same():
    documents = [TextDocument(str(n), "") for n in range(2000)]
    names = [document.name for document in sampled(iter(documents), 0.3)]
    assert names == [document.name for document in sampled(iter(documents), 0.3)]
    assert 500 < len(names) < 700
    assert len(list(sampled(iter(documents), 2.5))) == 2000


LONG = "a long document "


def pieces(name: str, *texts: str) -> list[TextDocument]:
    return [TextDocument(f"{name}#{n}", text, n > 0) for n, text in enumerate(texts)]


def test_a_long_document_is_a_duplicate_only_as_a_whole():
    documents = [
        *pieces("a", LONG, "first end"),
        *pieces("b", LONG, "other end"),
        *pieces("c", LONG, "first end"),
        *pieces("d", " ", "\n"),
        TextDocument("e", "", too_long=True),
    ]
    corpus = TextCorpus("it", lambda: iter(documents))
    plan = plan_split(corpus, 0.05, 1)
    assert plan.report == DataReport(
        documents=2, text_bytes=2 * len(LONG + "first end"), duplicates=1, empty=1, too_long=1
    )
    kept = "".join(both(corpus)[0] + both(corpus)[1])
    assert sorted(kept) == sorted(2 * LONG + "first end" + "other end")


@given(st.integers(2, 40), st.sampled_from([0.1, 0.3, 0.5]))
@settings(max_examples=100, deadline=None)
def test_a_piece_continues_only_the_piece_before_it(count: int, share: float):
    documents = pieces("a", *(f"{n} " * 20 for n in range(count)))
    corpus = TextCorpus("it", lambda: iter(documents))
    plan = plan_split(corpus, share, 1)
    for split in ("train", "heldout"):
        before = None
        for piece in split_documents(corpus, plan, split):
            number = int(piece.text.split()[0])
            assert piece.continues == (before == number - 1)
            # The end of a piece that is divided lies on the other side.
            before = number if piece.text == f"{number} " * 20 else None


@pytest.mark.parametrize(("similarity", "near"), [(1.0, 0), (0.8, 1)])
def test_near_duplicates_are_left_out_where_that_is_asked_for(similarity: float, near: int):
    words = [f"word{(number * number) % 997}" for number in range(600)]
    changed = [*words[:300], "changed", *words[301:]]
    corpus = of_texts({
        "first": " ".join(words), "other": " ".join(words[::-1]), "copy": " ".join(changed)
    })  # fmt: skip
    plan = plan_split(corpus, 0.3, 1, similarity)
    assert (plan.report.documents, plan.report.near_duplicates) == (3 - near, near)
    kept = [
        document.text
        for split in ("train", "heldout")
        for document in split_documents(corpus, plan, split)
    ]
    assert any("changed" in text for text in kept) == (near == 0)
    assert plan.report.text_bytes == sum(map(len, kept))
