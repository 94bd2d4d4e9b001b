"""The engine in another process, as an adversary finds it: its locks, its pipe, its errors, its end.

Most tests hold the other end of the pipe in their own hands (`Puppet`); some have a process that runs.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

pytest.importorskip("tokenizers")

from hibachi import SamplingParams
from hibachi.engine.batchengine import Facts
from hibachi.engine.health import Health
from hibachi.engine.runners.meters import Meters
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.stats import Stats
from hibachi.engine.streams.channel import Channel, Wakeups
from hibachi.errors import (
    EngineClosed,
    EngineFailed,
    HibachiError,
    InvalidRequest,
    InvalidTensorOperation,
    ModelError,
    NonFiniteOutput,
    QueueFull,
)
from hibachi.llm.remote import engine as remote
from hibachi.llm.remote import process, sender
from hibachi.llm.remote.child import Child, EngineReady, Outbox, OutChannel, _portable
from hibachi.llm.remote.engine import RemoteEngine
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.request import Finish, Request
from tests.adversary.drawn import Mute, Own, Unpicklable
from tests.engine.models import PATIENCE, Background, until
from tests.lib.inside import refuses, unanswered, unended

LONG = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
FACTS = Facts(100, Limits(4, 64, 64, 10**7), True, None, False, True, "a library; a device", "float32", "Puppet")
READY = EngineReady(FACTS, (), None)


class Puppet:
    """In the place of `subprocess.Popen` and of the engine's process: says and does what the test wants."""

    def __init__(self, command, *, pass_fds, **_):
        self.pipe, self.pid, self.returncode = Connection(os.dup(pass_fds[0])), 12345, None
        self._met, self._ended = False, threading.Event()
        self.say("ready", READY)

    def say(self, *message):
        self.pipe.send(message)

    def hear(self):
        """What it was sent next; a request with its contents."""
        assert self.pipe.poll(PATIENCE), "nothing was sent"
        message = self.pipe.recv()
        if not self._met:
            self._met = True
            return self.hear()  # that was what model to make
        return (*message, pickle.loads(self.pipe.recv_bytes())) if message[0] in ("run", "ask") else message

    def tokens(self, number, *tokens):
        self.say("step", [], [(number, token, None) for token in tokens], {}, [])

    def finish(self, number):
        self.say("step", [], [], {}, [(number, Finish.LENGTH, None, (None, None, None))])

    def beat(self, state="running"):
        self.say("beat", Health(state, f"It is {state}."), Stats(), Meters(limit=4))

    def kill(self):
        if self.returncode is None:
            self.returncode = -9
            self.pipe.close()
            self._ended.set()

    def wait(self, timeout=None):
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("puppet", timeout)
        return self.returncode


class Stage:
    """An engine whose processes are puppets."""

    def __init__(self, monkeypatch, **options):
        self.puppets, self.meanwhile = [], lambda: None
        fake = SimpleNamespace(Popen=self._made, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(process, "subprocess", fake)
        self.engine = RemoteEngine("a model", **options)

    def _made(self, *args, **kwargs):
        self.meanwhile()
        self.puppets.append(Puppet(*args, **kwargs))
        return self.puppets[-1]

    @property
    def puppet(self):
        return self.puppets[-1]

    def stream(self, prompt=(1, 2), **changes):
        engine = self.engine
        return engine.submit(engine.check(Request(list(prompt), LONG.with_(**changes), include_stop=False)))

    def began_again(self, n):
        until(lambda: self.engine.restarts == n and self.engine.health().ok)


@pytest.fixture
def stage(monkeypatch):
    made = []

    def make(**options):
        made.append(Stage(monkeypatch, **options))
        return made[-1]

    yield make
    for own in made:
        Background(own.engine.close, 0).result()


@pytest.fixture(scope="module")
def there():
    llm = RemoteLLM("tiny", max_num_seqs=4, pause_after=8)
    yield llm
    os.kill(llm.engine.pid, signal.SIGCONT)
    Background(llm.close).result()


# ---- C3: no lock that a destructor can meet ------------------------------------------------------------------------


def test_c3_a_destructor_in_the_midst_of_anything(stage, monkeypatch):
    """Every place at which a request is being sent, or heard of, may be the one where the collector comes by."""
    own = stage(max_num_queued_reqs=1000)
    victims = Background(lambda: [own.stream() for _ in range(200)]).result()
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        if frame.f_code.co_filename in (remote.__file__, sender.__file__):
            if event == "line" and victims and frame.f_code.co_name != "_cancel":
                lines += 1
                sys.settrace(None)
                victims.pop().close()
                sys.settrace(trace)
            return trace
        return None

    def run():
        sys.settrace(trace)
        try:
            for _ in range(8):
                own.stream().close()
        finally:
            sys.settrace(None)

    Background(run).result()
    assert lines > 100 and len(unended(own.engine)) == len(victims)


# ---- M8: what cannot be sent ---------------------------------------------------------------------------------------


def test_m8_what_cannot_be_pickled_is_refused_at_the_call_and_leaves_no_place(stage):
    own = stage(max_num_queued_reqs=0)  # 4 rows: a fifth would be refused
    for _ in range(5):
        with pytest.raises(InvalidRequest, match=r"pickle.*functions or classes of a module"):
            own.stream(logits_processors=[lambda ids, logits: logits])
    stream = own.stream()
    assert own.puppet.hear()[0] == "run"  # and nothing before
    stream.close()
    assert own.engine.drain(PATIENCE)


class Unreadable:
    """Can be sent, and not be read. what: called with `args` when it is."""

    def __init__(self, what, *args):
        self.what, self.args = what, args

    def __reduce__(self):
        return self.what, self.args

    def __call__(self, ids, logits):
        return logits


@pytest.mark.parametrize("processor", [Unreadable(int, "x"), Unreadable(sys.exit, 3)])
def test_m8_what_cannot_be_read_there_ends_its_own_request(there, processor):
    good, bad = there.stream("She was", LONG), there.stream("a", LONG.with_(logits_processors=[processor]))
    with pytest.raises(InvalidRequest, match="cannot be read in the engine's process"):
        bad.tokens.collect()
    assert len(good.tokens.collect()) == LONG.max_tokens


# ---- the pipe ------------------------------------------------------------------------------------------------------


def test_a_full_pipe_blocks_no_caller_and_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(sender, "MOST_UNSENT", 300_000)
    own = stage()
    streams = []

    def fill():
        while True:
            streams.append(own.stream(range(99), logit_bias={i: 1.0 for i in range(100)}))

    with pytest.raises(QueueFull, match=r"at most 300000 bytes.*got (300000|29\d{4}), and \d+ more"):
        Background(fill).result()
    assert len(unended(own.engine)) == len(streams) > 100  # the one that was refused left no place
    for stream in streams:
        stream.close()

    def hear():
        heard = []
        while not heard or heard[-1][-1] != [7]:
            what, number, *contents = own.puppet.hear()
            heard.append((what, number, contents and contents[-1].prompt.tolist()))
        return heard

    hearing = Background(hear)

    def submitted():
        try:
            return own.stream([7])
        except QueueFull:
            return None

    until(lambda: streams.append(submitted()) or streams[-1] is not None)
    *before, last = hearing.result()
    sent = [number for what, number, _ in before if what == "run"]
    assert sorted(number for what, number, _ in before if what == "cancel") == sent
    assert len(sent) < len(streams) // 2  # the others were cancelled before they were sent, and never were
    own.puppet.finish(last[1])
    assert streams[-1].collect() == []


def test_one_request_larger_than_the_bound_goes_if_nothing_waits(stage, monkeypatch):
    monkeypatch.setattr(sender, "MOST_UNSENT", 1000)
    own = stage()
    large = own.stream([1] * 100_000)
    with pytest.raises(QueueFull):
        own.stream([1])
    assert len(own.puppet.hear()[-1].prompt) == 100_000 and large.finish_reason is None


def test_pause_and_resume_come_in_their_order(stage, monkeypatch):
    """A reader that catches up just as its request is paused: it must not be held for ever."""
    own = stage(pause_after=2)
    stream, pause = own.stream(), Channel.pause

    def raced(channel, drained):
        paused = pause(channel, drained)
        stream.come()
        return paused

    monkeypatch.setattr(Channel, "pause", raced)
    number = own.puppet.hear()[1]
    own.puppet.tokens(number, 1, 2)
    assert [own.puppet.hear()[0] for _ in range(2)] == ["pause", "resume"]
    monkeypatch.setattr(Channel, "pause", lambda channel, drained: False)  # the reader was faster still
    own.puppet.tokens(number, 3, 4)
    assert [own.puppet.hear()[0] for _ in range(2)] == ["pause", "resume"]


def test_what_cannot_be_understood_ends_the_process_and_not_the_listener(stage):
    own = stage()
    stream = own.stream()
    own.puppet.pipe.send_bytes(b"no pickle")
    with pytest.raises(EngineFailed):
        Background(stream.collect).result()


def test_e3_a_row_that_is_held_takes_no_more():
    channel = OutChannel(1, Outbox(None), lambda number: None)
    assert channel.takes(2) and not channel.full
    channel.hold()
    assert not channel.takes(1) and not channel.takes(2) and channel.full
    channel.release()
    assert channel.takes(2) and not channel.full


# ---- errors --------------------------------------------------------------------------------------------------------


def kinds(kind=HibachiError):
    """Of hibachi.errors; all of them have only a message, but one."""
    own = [kind] if kind.__module__ == "hibachi.errors" else []
    return own + [found for sub in kind.__subclasses__() for found in kinds(sub)]


def made(kind):
    if kind is InvalidTensorOperation:
        return kind("take", expected="indices", got="floats", mend="Round them")
    return kind("Expected this; got that. Do it like so.")


@pytest.mark.parametrize("kind", list(dict.fromkeys(kinds())))
def test_every_error_survives_the_way(kind):
    error = made(kind)
    error.hint = {"a": 1}
    error.__cause__ = Unpicklable("deep down")
    there = pickle.loads(pickle.dumps(_portable(error)))
    assert type(there) is kind and str(there) == str(error) and there.args == error.args
    assert vars(there) == vars(error) and "hint" in vars(there)
    assert str(there.__cause__) == "Unpicklable: deep down"
    for name in ("op", "expected", "got", "mend", "msg", "name"):  # `msg` and `name` are those of an ImportError
        assert getattr(there, name, None) == getattr(error, name, None)
    again = pickle.loads(pickle.dumps(made(kind)))
    assert again.__cause__ is None and str(again) == str(error)


class OwnFault(NonFiniteOutput):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    "error, kind, text",
    [
        (Own("regex"), ModelError, "Own: regex"),
        (SystemExit(3), ModelError, "SystemExit: 3"),
        (Unpicklable("x"), ModelError, "Unpicklable: x"),
        (Mute("x"), ModelError, "Mute: (its message could not be made)"),
        (OwnFault(1, 2), NonFiniteOutput, "OwnFault: 1 and 2"),
        (MemoryError("12 GB"), MemoryError, "12 GB"),
    ],
)
def test_an_error_of_ones_own_type_arrives_with_its_text(error, kind, text):
    there = pickle.loads(pickle.dumps(_portable(error)))
    assert type(there) is kind and str(there) == text


RAISING = """
import os
import time

import hibachi
import numpy as np

class Own(Exception):
    pass

class Lost(Exception):
    pass

class Fragile(hibachi.NumpyBackend):
    def fatal(self, error):
        return isinstance(error, Lost)

class Raises:
    vocab_size, max_model_len, backend = 26, 64, Fragile()
    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        if (tokens == 13).any():
            raise Own("thirteen")
        if (tokens == 14).any():
            time.sleep(60)
        if (tokens == 15).any():
            raise Lost("the device")
        return np.eye(26, dtype=np.float32)[(tokens[:, -1] + 1) % 26] * 10

class Forks(Raises):
    def __init__(self):
        if not os.fork():  # a process of the model's own, which outlives the engine's
            open(__file__ + ".pid", "w").write(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
"""


@pytest.fixture(scope="module")
def raising(tmp_path_factory):
    file = tmp_path_factory.mktemp("raising") / "raising.py"
    file.write_text(RAISING)
    return file


def test_an_error_of_the_models_own_type_ends_its_request_only(raising):
    with RemoteLLM(f"{raising}:Forks") as llm:
        params = SamplingParams(temperature=0, max_tokens=5)
        good, bad = llm.stream([1], params), llm.stream([13], params)
        with pytest.raises(ModelError, match="thirteen") as caught:
            bad.tokens.collect()
        assert "Own: thirteen" in f"{caught.value} {caught.value.__cause__}"
        assert good.tokens.collect() == [2, 3, 4, 5, 6]
        last = llm.stream([14], params)
        os.kill(llm.engine.pid, signal.SIGKILL)
        try:
            with pytest.raises(EngineFailed, match="signal 9"):  # though another process of the model's goes on
                Background(last.tokens.collect).result()
        finally:
            os.kill(int(raising.with_name("raising.py.pid").read_text()), signal.SIGKILL)


def test_an_engine_that_has_failed_for_good_gets_a_new_process(raising):
    params = SamplingParams(temperature=0, max_tokens=3)
    with RemoteLLM(f"{raising}:Raises", restart="on_failure") as llm:
        first, bad = llm.engine.pid, llm.stream([15], params)
        with pytest.raises(EngineFailed, match="the device"):
            Background(bad.tokens.collect).result()
        until(lambda: llm.engine.restarts == 1 and llm.health().ok)
        assert llm.engine.pid != first and llm.generate([[1]], params)[0].token_ids == [2, 3, 4]


# ---- its end, and what comes after -----------------------------------------------------------------------------------


def lose(own, restarts, *, tokens=0):
    """The process dies after so many tokens, with a request that fails; the engine has begun again so often then."""
    stream = own.stream()
    number = own.puppet.hear()[1]
    if tokens:
        own.puppet.tokens(number, *range(tokens))
        until(lambda: stream.channel.buffer)
    own.puppet.kill()
    with pytest.raises(EngineFailed, match="signal 9"):
        assert stream.collect() == list(range(tokens))
    until(lambda: own.engine.restarts == restarts)


def test_e2_a_restart_is_forgiven_after_a_token(stage):
    own = stage(restart="on_failure")
    for n in range(1, 8):
        lose(own, n, tokens=n % 2)  # every second one helps
        own.began_again(n)
    for n in (8, 9):
        lose(own, n)
        own.began_again(n)
    lose(own, 9)  # the third in a row was the last
    until(lambda: own.engine.health().state == "failed")
    with pytest.raises(EngineFailed, match="Start it again"):
        own.stream()
    assert len(own.puppets) == 10


def test_one_that_is_begun_again_and_is_never_ready_is_given_up(stage, monkeypatch):
    monkeypatch.setattr(remote, "LEAST_START", 0.2)
    own = stage(restart="on_failure")
    monkeypatch.setattr(Puppet, "say", lambda *_: None)
    own.puppet.kill()
    until(lambda: "not ready within" in own.engine.health().message)
    assert len(own.puppets) == 1 + remote.MOST_RESTARTS and own.puppet.returncode is not None
    assert own.engine.health().state == "failed"


def test_a_call_to_one_that_hangs_ends(stage, monkeypatch):
    monkeypatch.setattr(remote, "ANSWER", 0.1)
    own = stage()
    with pytest.raises(EngineFailed, match="has not answered"):
        Background(own.engine.dump).result()


def test_one_whose_engine_has_failed_for_good_is_ended_and_begun_again(stage):
    own = stage(restart="on_failure")
    stream, first = own.stream(), own.puppet
    number = first.hear()[1]
    first.say("step", [], [], {}, [(number, Finish.ERROR, EngineFailed("The loop failed."), (None, None, None))])
    first.beat("failed")
    with pytest.raises(EngineFailed, match="loop"):
        stream.collect()
    own.began_again(1)
    assert first.returncode is not None
    stream = own.stream()
    number = own.puppet.hear()[1]
    own.puppet.finish(number)
    assert stream.collect() == []


def test_one_that_has_failed_stays_so_if_it_may_not_begin_again(stage):
    own = stage()
    own.puppet.beat("failed")
    until(lambda: own.engine.health().state == "failed")
    assert own.puppet.returncode is None and not own.engine.drain(0)


def test_draining_ends_when_the_process_stalls_or_is_lost(stage):
    silent, own = stage(stall_after=0.05), stage()
    stream = silent.stream()
    assert Background(silent.engine.drain).result() is False and stream.finish_reason is None
    stream = own.stream()
    draining = Background(own.engine.drain)
    own.puppet.beat("stalled")
    assert draining.result() is False
    own.puppet.kill()
    until(lambda: stream.finish_reason is Finish.ERROR)
    assert own.engine.drain() is False


def test_one_that_drains_is_not_begun_again(stage):
    before, own = set(threading.enumerate()), stage(restart="on_failure")
    stream = own.stream()
    draining = Background(own.engine.drain)
    until(lambda: refuses(own.engine))
    own.puppet.kill()
    assert draining.result() is False
    until(lambda: not [t for t in set(threading.enumerate()) - before if t.name == "hibachi-remote"])
    assert len(own.puppets) == 1
    assert own.engine.health().state == "failed" and stream.finish_reason is Finish.ERROR


def test_one_that_was_drained_while_it_began_again_takes_no_requests(stage):
    own = stage(restart="on_failure")
    drained = []
    own.meanwhile = lambda: drained.append(own.engine.drain(0))
    own.puppet.kill()
    until(lambda: own.engine.restarts == 1)
    assert drained == [False] and own.engine.health().ok
    with pytest.raises(EngineClosed, match="draining"):
        own.stream()
    assert own.engine.drain(0)


def test_draining_sees_that_a_stream_was_closed(stage):
    own = stage()
    stream = own.stream()
    draining = Background(own.engine.drain)
    until(lambda: refuses(own.engine))
    stream.close()
    assert draining.result() is True


def test_closing_with_a_full_pipe_ends_streams_and_kills(stage):
    own = stage()
    stream = own.stream([1] * 10**6)
    asked = Background(own.engine.dump)
    until(lambda: unanswered(own.engine))
    Background(own.engine.close, 0.01).result()
    assert stream.collect() == [] and stream.finish_reason is Finish.CLOSED
    assert own.puppet.returncode == -9 and own.engine.health().state == "closed"
    with pytest.raises(EngineClosed):
        asked.result()


def test_closing_leaves_no_thread(stage):
    before = set(threading.enumerate())
    own = stage(restart="on_failure")
    own.puppet.kill()
    own.began_again(1)
    stream = own.stream([1] * 10**6)
    Background(own.engine.close, 0).result()
    assert stream.finish_reason is Finish.CLOSED
    until(lambda: not any(t.name.startswith("hibachi-remote") for t in set(threading.enumerate()) - before))


def in_fork(do):
    """What `do()` says in a fork of this process; "hangs" if it says nothing."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if not pid:
        signal.alarm(PATIENCE)
        try:
            os.write(writing, repr(do()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said or "hangs"


def raised(call):
    try:
        return call()
    except HibachiError as e:
        return f"{type(e).__name__}: {e}"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of JAX, if it was imported before
def test_m2_a_fork_has_no_engine(there):
    long = LONG.with_(max_tokens=200)  # longer than what comes before a reader is waited for
    running = there.stream("a", long)
    calls = {
        "stream": lambda: there.stream("a", LONG),
        "dump": there.dump,
        "embed": lambda: there.embed("a"),
        "read": running.tokens.collect,
    }
    for call in calls.values():
        assert "EngineClosed: The engine was made before a fork" in in_fork(lambda call=call: raised(call))
    assert "before a fork" in in_fork(lambda: (there.close(), there.health())[1].message)
    assert in_fork(lambda: there.engine._process.pipe.closed) == "True"
    assert len(running.tokens.collect()) == long.max_tokens  # here all is as before
    assert there.generate("a", LONG)[0].token_ids


def test_whoever_learns_that_the_engine_has_failed_finds_it_so():
    """How it is comes before the ends of its streams."""
    sent = []
    outbox = Outbox(SimpleNamespace(send=lambda message: sent.append(message[0])))
    engine = SimpleNamespace(health=lambda: "failed", stats=lambda: 1, meters=lambda: 2, facts=None)
    Child(None, SimpleNamespace(engine=engine), outbox)
    for error, words in ((ModelError("x"), ["step"]), (EngineFailed("x"), ["beat", "step"])):
        sent.clear()
        wakeups = Wakeups()
        OutChannel(1, outbox, lambda number: None).end(Finish.ERROR, error, wakeups)
        wakeups.post()
        assert sent == words
