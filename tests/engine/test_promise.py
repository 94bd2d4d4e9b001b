"""The trial of determinism: at once where it was asked for, else beside the first requests where bits have a name."""

import logging
import threading
from types import SimpleNamespace

import pytest

from hibachi import LLM, AutoregressiveBatchInference, NotDeterministic, NumpyBackend, SamplingParams, load_model
from hibachi.backend.numpy_backend import NativeNumpyBackend
from hibachi.engine import promise
from hibachi.engine.promise import UNTRIED, ProposalsDiffer
from hibachi.llm.model.files import TINY
from hibachi.llm.remote.child import Child

from ..tensor.native import skip_without
from .models import PATIENCE, until

skip_without()
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Liar(NativeNumpyBackend):
    """Says that its bits are those of the kernels, and scales a row by how many others there are."""

    def fuse(self, decoder):
        return None

    def gated(self, x, activation):
        return super().gated(x, activation) * (1 + 1e-6 * len(x))


class Held:
    """A trial that waits in its first step, and then ends as is said."""

    def __init__(self, error=None):
        self.error, self.began, self.go, self.closed = error, threading.Event(), threading.Event(), False

    def __call__(self, runner, *, speculated=False):
        try:
            for turn in range(3):
                self.began.set()
                assert self.go.wait(PATIENCE)
                yield turn
            if self.error is not None:
                raise self.error
            return 30
        finally:
            self.closed = True


@pytest.fixture
def held(monkeypatch):
    trial, whole = Held(), promise.steps
    # A trial at once says whether the cache is unused; only one that is left for later is held.
    monkeypatch.setattr(promise, "steps", lambda runner, **how: (whole if "unused" in how else trial)(runner, **how))
    yield trial
    trial.go.set()


def engine(backend=None, **options):
    model = load_model(TINY, backend or NumpyBackend(native=True))
    return AutoregressiveBatchInference(model, max_model_len=64, **options)


def test_a_first_token_comes_before_the_trial_has_ended(held):
    with engine() as e:
        assert e.facts.remarks == (UNTRIED,) and e.deterministic and e.facts.deterministic
        stream = e.run([1, 2, 3], GREEDY)
        first = next(stream)
        assert held.began.wait(PATIENCE) and e.facts.remarks == (UNTRIED,)
        held.go.set()
        rest = stream.collect()
        until(lambda: not e.facts.remarks)
        assert held.closed and e.deterministic and e.facts.deterministic
        assert e.run([1, 2, 3], GREEDY).collect() == [first, *rest]


def test_where_it_was_asked_for_the_engine_is_made_after_the_trial(held, caplog):
    with caplog.at_level(logging.INFO, "hibachi.engine"), engine(deterministic=True) as e:
        assert e.deterministic and e.facts.remarks == () and not held.began.is_set()
        assert "deterministic=True; numpy" in caplog.text
    with pytest.raises(NotDeterministic, match=r"the output after \d+ random tokens differs"):
        engine(Liar(), deterministic=True)


def test_nothing_is_tried_where_it_is_not_wanted(held):
    with engine(deterministic=False) as e:
        assert e.facts.remarks == () and len(e.run([1], GREEDY).collect()) == 6
    assert not held.began.is_set()


def test_the_whole_trial_runs_beside_requests_and_by_itself(monkeypatch):
    turns, own = [], promise.steps

    def counted(runner, **how):
        found = yield from (turns.append(done) or done for done in own(runner, **how))
        return found

    monkeypatch.setattr(promise, "steps", counted)
    with engine() as e:
        assert not turns  # nobody has asked for anything
        e.run([1, 2, 3], GREEDY.with_(max_tokens=1)).collect()
        until(lambda: not e.facts.remarks)
        assert turns == sorted(turns) and set(turns) == {0, 1, 2, 3} and e.deterministic
        assert e.meters().computed == 3  # of the request


def test_who_checks_it_need_not_be_waited_for(held):
    with engine() as e:
        assert e.selfcheck() > 3 and e.facts.remarks == () and e.deterministic
        e.run([1, 2, 3], GREEDY).collect()
        assert not held.began.is_set()


def test_a_difference_that_is_found_later_is_told_and_requests_go_on(caplog):
    with caplog.at_level(logging.WARNING, "hibachi.engine"), engine(Liar(), speculative_config="auto") as e:
        assert e.deterministic and e.facts.speculates and e.core.drafting is not None
        stream = e.run([1, 2, 3], GREEDY.with_(max_tokens=40))
        until(lambda: not e.deterministic)
        assert len(stream.collect()) == 40
        assert not e.facts.deterministic and not e.facts.speculates
        [remark] = e.facts.remarks
        assert "differs by up to" in remark
        assert len(e.run([1, 2, 3], GREEDY).collect()) == 6
    assert "deterministic=False, as the check of the model failed" in caplog.text


@pytest.mark.parametrize("config, keeps, proposes", [("auto", True, False), ({"method": "ngram"}, False, True)])
def test_proposals_that_change_bits_are_made_no_more_unless_they_were_asked_for(held, caplog, config, keeps, proposes):
    held.error = ProposalsDiffer("planted (speculated)")
    held.go.set()
    if config != "auto":
        config |= {"num_speculative_tokens": 3}
    with caplog.at_level(logging.INFO, "hibachi.engine"), engine(speculative_config=config) as e:
        assert e.facts.speculates
        assert len(e.run([5, 6, 5, 6, 5, 6, 5], GREEDY.with_(max_tokens=20)).collect()) == 20
        until(lambda: held.closed and e.facts.remarks == ("planted (speculated)",))
        assert e.deterministic is e.facts.deterministic is keeps and e.facts.speculates is proposes
        before = e.meters().drafted.proposed
        e.run([5, 6, 5, 6, 5, 6, 5], GREEDY.with_(max_tokens=40)).collect()
        assert (e.meters().drafted.proposed > before) is proposes


@pytest.mark.parametrize("drains", [False, True])
def test_an_engine_that_is_closed_waits_for_one_step_of_the_trial_at_most(held, drains):
    e = engine()
    e.run([1, 2, 3], GREEDY.with_(max_tokens=1)).collect()
    assert held.began.wait(PATIENCE)
    if drains:  # what is left of the trial is nothing to wait for
        threading.Timer(0.05, held.go.set).start()
        assert e.drain(PATIENCE)
    threading.Timer(0.05, held.go.set).start()
    e.close()
    assert held.closed and e.health().state == "closed"


def test_an_engine_that_no_request_came_to_is_closed():
    with LLM("tiny", backend=NumpyBackend(native=True)) as llm:
        assert llm.engine.facts.remarks == (UNTRIED,)


def test_facts_that_change_are_told_to_another_process():
    sent, facts = [], ["before"]

    class Engine:
        health = stats = meters = staticmethod(lambda: None)
        facts = property(lambda self: facts[-1])

    outbox = SimpleNamespace(send=lambda *said: sent.append(said))
    assert Child(None, SimpleNamespace(engine=Engine()), outbox).ready().facts == "before"
    outbox.beat()
    facts.append("after")
    outbox.beat()
    outbox.beat()
    assert [word for word, *_ in sent] == ["beat", "facts", "beat", "beat"] and ("facts", "after") in sent
