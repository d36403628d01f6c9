"""Properties of the embedded corpus that the recipe and its figures rely on."""

import hashlib
import json
from collections import Counter

import mini_corpus
import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression


def test_sizes_and_balance(mini):
    assert {name: len(rows) for name, rows in mini.items()} == {"train": 20_000, "dev": 1_000, "test": 1_000}
    for rows in mini.values():
        assert sum(label for _, label in rows) * 2 == len(rows)


def test_no_text_occurs_twice_in_any_split(mini):
    counts = Counter(text for rows in mini.values() for text, _ in rows)
    assert max(counts.values()) == 1


def test_same_corpus_every_time_and_everywhere(mini):
    again = mini_corpus.generate()
    assert again == mini
    digest = hashlib.sha256(json.dumps(mini, ensure_ascii=False).encode()).hexdigest()
    assert digest[:16] == "d87f5790180e11f0"


def test_another_seed_gives_another_corpus(mini):
    other = mini_corpus.generate(seed=7)
    shared = {text for text, _ in other["train"]} & {text for text, _ in mini["train"]}
    assert len(shared) < len(mini["train"]) / 5


def test_labels_are_not_ordered(mini):
    labels = np.array([label for _, label in mini["train"]])
    # Runs test: the number of changes is Normal(n/2, n/4) for a random order; 5 standard deviations.
    changes = int((labels[1:] != labels[:-1]).sum())
    assert abs(changes - len(labels) / 2) < 5 * (len(labels) / 4) ** 0.5


def test_every_character_is_in_the_tiny_vocabulary(mini):
    from ernie import tiny_vocabulary

    known = set(tiny_vocabulary())
    unknown = {char for rows in mini.values() for text, _ in rows for char in text} - known
    assert not unknown


@pytest.mark.parametrize("field", ["openers", "good_events", "bad_events", "good_endings", "bad_endings"])
def test_phrases_are_distinct_within_a_domain(field):
    for domain in mini_corpus.DOMAINS:
        phrases = getattr(domain, field).split()
        assert len(set(phrases)) == len(phrases) >= 5


def test_no_phrase_both_praises_and_blames():
    for domain in mini_corpus.DOMAINS:
        good = set(domain.good_events.split()) | set(domain.good_endings.split())
        bad = set(domain.bad_events.split()) | set(domain.bad_endings.split())
        assert not good & bad
        for aspect in domain.aspects:
            assert not set(aspect.praise.split()) & set(aspect.blame.split())


def test_learnable_but_not_from_characters_alone(mini):
    """A linear model over characters is far from chance and leaves room for one that reads the order."""
    texts, labels = zip(*mini["train"][:4000])
    test_texts, test_labels = zip(*mini["test"])
    accuracies = []
    for longest in (1, 3):
        counts = CountVectorizer(analyzer="char", ngram_range=(1, longest), min_df=3, binary=True)
        model = LogisticRegression(max_iter=200, C=0.3).fit(counts.fit_transform(texts), labels)
        accuracies.append(model.score(counts.transform(test_texts), test_labels))
    assert 0.80 < accuracies[0] < 0.92
    assert accuracies[0] < accuracies[1] < 0.98
