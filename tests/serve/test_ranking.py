"""Texts that are compared by their vectors, and inputs that are put into classes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from hibachi.llm.own import open_model
from hibachi.llm.remote.llm import open_remote
from hibachi.server.web.tenants import Tenant, Tenants

from .conftest import site

SCORES = pytest.mark.parametrize("path", ["/score", "/v1/score"])
RANKS = pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
TEXTS = ["Emma", "Anne Elliot", "It is a truth"]


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["code"]


def cosine(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return a @ b / np.sqrt(a @ a) / np.sqrt(b @ b)


@pytest.fixture(scope="module")
def vectors(server):
    data = server.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
    return [d["embedding"] for d in data]


@SCORES
def test_scores_are_cosines(server, vectors, path):
    answer = server.post(path, {"text_1": TEXTS[0], "text_2": TEXTS, "request_id": "mine"}).json()
    assert answer["object"] == "list" and answer["model"] == "tiny" and answer["id"] == "score-mine"
    assert [(d["index"], d["object"]) for d in answer["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    assert_allclose([d["score"] for d in answer["data"]], [cosine(vectors[0], v) for v in vectors], atol=1e-5)
    single = server.post("/v1/embeddings", {"input": [TEXTS[0], *TEXTS]}).json()["usage"]
    assert answer["usage"] == single
    pairs = server.post(path, {"queries": TEXTS, "documents": TEXTS[::-1]}).json()["data"]
    expected = [cosine(a, b) for a, b in zip(vectors, vectors[::-1], strict=True)]
    assert_allclose([d["score"] for d in pairs], expected, atol=1e-5)


@RANKS
def test_the_nearest_documents_come_first(server, vectors, path):
    body = {"model": "tiny", "query": TEXTS[1], "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    answer = server.post(path, body).json()
    results = answer["results"]
    assert results[0]["index"] == 1 and results[0]["relevance_score"] == pytest.approx(1, abs=1e-5)
    assert [r["document"]["text"] for r in results] == [TEXTS[r["index"]] for r in results]
    assert_allclose(
        [r["relevance_score"] for r in results], [cosine(vectors[1], vectors[r["index"]]) for r in results], atol=1e-5
    )
    assert [r["relevance_score"] for r in results] == sorted((r["relevance_score"] for r in results), reverse=True)
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] > 3
    (best,) = server.post(path, {**body, "top_n": 1, "return_documents": False}).json()["results"]
    assert best == {"index": 1, "relevance_score": results[0]["relevance_score"]}


def test_they_count_as_a_tenant_s(texts):
    """max_requests: each text is one vector, and none is computed if that is too many."""
    tenants = Tenants((("k", "small"),), {"small": Tenant(max_requests=3)})
    with site(texts, tenants=tenants) as here:
        key = {"Authorization": "Bearer k"}
        body = {"query": "a", "documents": ["b", "c"]}
        assert refused(here.post("/rerank", body), 401)[1] == "invalid_api_key"
        assert here.post("/rerank", body, headers=key).status_code == 200
        assert refused(here.post("/rerank", {"query": "a", "documents": list("bcd")}, headers=key)) == (
            None,
            "tenant_limit",
        )
        assert here.post("/score", {"text_1": "a", "text_2": "b"}, headers=key).status_code == 200
        while here.served.tenants.served["small"]:  # an answer comes before its end
            pass


# ---- vectors of fewer dimensions -------------------------------------------------------------------------------------


def test_the_first_numbers_of_a_vector(server, vectors):
    """`dimensions`: made unit length again; as many as the model has are all of them."""
    data = server.post("/v1/embeddings", {"input": TEXTS, "dimensions": 8}).json()["data"]
    for told, whole in zip(data, vectors, strict=True):
        first = np.array(whole[:8])
        assert_allclose(told["embedding"], first / np.linalg.norm(first), atol=1e-6)
    (whole,) = server.post("/v1/embeddings", {"input": TEXTS[0], "dimensions": 256}).json()["data"]
    assert_allclose(whole["embedding"], vectors[0], atol=1e-6)
    for n in (0, -1, 257, 10**30):
        assert refused(server.post("/v1/embeddings", {"input": "a", "dimensions": n})) == (
            "dimensions",
            "invalid_value",
        )


# ---- classes ---------------------------------------------------------------------------------------------------------

CLASSIFIER = '''
import numpy as np

class Signs:
    """Negative, or positive: a logit for each."""

    labels = ["negative", "positive"]
    token = np.zeros(3, np.float32)

    def forward(self, x):
        if np.isnan(x).any():
            raise ValueError("not a number")
        total = x.sum(axis=1)
        return np.stack([-total, total], axis=1)

class Shares(Signs):
    probabilities = True

    def forward(self, x):
        share = 1 / (1 + np.exp(-x.sum(axis=1)))
        return np.stack([1 - share, share], axis=1)

class Wrong(Signs):
    """A number less than labels for what begins with 9, and no number at all for what begins with 8."""

    def forward(self, x):
        found = super().forward(x)
        found[x[:, 0] == 8] = np.nan
        return found

class Plain(Signs):
    labels = None
    feedforward = True

class Any(Signs):
    token = None

    def forward(self, x):
        total = x.reshape(len(x), -1).sum(axis=1)
        return np.stack([-total, total], axis=1)
'''


@pytest.fixture(scope="module")
def classifier_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("classes") / "signs.py"
    file.write_text(CLASSIFIER)
    return file


@pytest.fixture(scope="module", params=[open_model, open_remote], ids=["own", "child"])
def classifier(request, classifier_file):
    with request.param(f"{classifier_file}:Signs", max_num_seqs=4) as model, site(model) as here:
        yield here


def own(file, name):
    return open_model(f"{file}:{name}", max_num_seqs=4)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_inputs_are_put_into_classes(classifier):
    answer = classifier.post("/classify", {"input": [[1, 0, 0.5], [-1, 0, -0.5]], "request_id": "mine"}).json()
    assert answer["id"] == "classify-mine" and answer["object"] == "list" and answer["model"] == "tiny"
    first, second = answer["data"]
    assert (first["index"], first["label"], first["num_classes"]) == (0, "positive", 2)
    assert_allclose(first["probs"], [sigmoid(-3), sigmoid(3)])
    assert second["label"] == "negative" and answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    (alone,) = classifier.post("/classify", {"input": [1, 0, 0.5]}).json()["data"]
    assert alone == first
    (raw,) = classifier.post("/classify", {"input": [1, 0, 0.5], "use_activation": False}).json()["data"]
    assert raw["probs"] == [-1.5, 1.5]


def test_outputs_that_are_probabilities_are_told_as_they_are(classifier_file):
    with own(classifier_file, "Shares") as model, site(model) as here:
        (found,) = here.post("/classify", {"input": [1, 1, 1]}).json()["data"]
        assert_allclose(found["probs"], [sigmoid(-3), sigmoid(3)], rtol=1e-6)


def test_a_model_without_labels_does_not_classify(classifier_file):
    with own(classifier_file, "Plain") as model, site(model) as here:
        assert refused(here.post("/classify", {"input": [1, 2, 3]})) == (None, "unsupported")


def test_what_is_no_number_is_the_model_s_fault(classifier_file):
    with own(classifier_file, "Wrong") as model, site(model) as here:
        assert refused(here.post("/classify", {"input": [[8, 2, 3]]}), 500)[1] == "model_fault"
        assert here.post("/classify", {"input": [[1, 2, 3]]}).status_code == 200
