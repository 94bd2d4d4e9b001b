"""The command line without a terminal: in this process where that is enough, else in one of its own."""

import io
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hibachi import LLM, SamplingParams
from hibachi.cli import demo

from ..lib.command import called

COMMAND = [sys.executable, "-m", "hibachi"]
GREEDY = ["generate", "--temperature", "0", "--max-tokens", "8"]


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*args, stdin=""): exit status, standard output and standard error of the command, in this process."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return called(capsys, *args)

    return call


def process(*args, shell="", **options):
    """The command in a process of its own; shell: redirections."""
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", *COMMAND, *args]
    return subprocess.run(command, capture_output=True, timeout=60, **options)


@pytest.fixture(scope="module")
def text():
    """What the model writes after "She was"."""
    with LLM("tiny") as llm:
        return llm.generate("She was", SamplingParams(temperature=0, max_tokens=8))[0].text


# ---- help and arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        *(
            "",
            "demo",
            "generate",
            "chat",
            "serve",
            "route",
            "inspect",
            "doctor",
            "verify",
            "conformance",
            "sim",
            "bench",
        ),
        *("bench fit", "cache", "cache ls", "cache verify", "cache clear"),
    ],
)
def test_help_fits_a_terminal(run, command):
    status, out, err = run(*command.split(), "--help")
    assert (status, err) == (0, "") and f"usage: hibachi {command}".strip() in out
    assert max(map(len, out.splitlines())) <= 80
    assert command or all(f" {name}" in out for name in ("demo", "generate", "chat", "inspect", "doctor"))


def test_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"hibachi {version('hibachi')}\n", "")
    assert process("--version").stdout.decode() == f"hibachi {version('hibachi')}\n"


@pytest.mark.parametrize(
    "args, message",
    [
        ("", "the following arguments are required: COMMAND"),
        ("frobnicate", "invalid choice: 'frobnicate'"),
        ("generate --wrong --more", "hibachi generate: error: unrecognized arguments: --wrong --more"),
        ("generate stray", "hibachi generate: error: unrecognized arguments: stray"),
        ("generate --max 3", "unrecognized arguments: --max 3"),  # no abbreviations: they break with the next option
        ("generate --max-tokens many", "argument --max-tokens: invalid int value: 'many'"),
        ("generate --max-new-tokens 3", "--max-new-tokens 3 (did you mean --max-tokens?)"),
        ("serve tiny --gpu-memory-utilization 0.5", "did you mean --kv-cache-memory-bytes? It takes the bytes"),
        ("serve tiny --max-batch-size 3", "unrecognized arguments: --max-batch-size (of text-generation-launcher"),
        ("doctor stray", "hibachi doctor: error: unrecognized arguments: stray"),
        ("demo --tokens many", "argument --tokens: invalid int value: 'many'"),
    ],
)
def test_wrong_arguments_are_explained(run, args, message):
    status, out, err = run(*args.split())
    assert (status, out) == (2, "") and err.startswith("usage: ") and message in err.splitlines()[-1]


def refused(result, message):
    """One line on standard error, nothing else."""
    status, out, err = result
    assert (status, out) == (1, "") and err.startswith("hibachi: ") and message in err
    return err.count("\n") == 1


@pytest.mark.parametrize(
    "args, message",
    [
        ("--max-tokens 0", "max_tokens must be an integer >= 1"),
        ("--max-tokens -3", "max_tokens must be an integer >= 1"),
        ("--temperature -1", "temperature must be a finite number >= 0"),
        ("--temperature nan", "temperature must be a finite number >= 0"),
        ("--top-k -2", "top_k must be an integer >= -1"),
        ("--top-p 0", "top_p must be a number in (0, 1]"),
        ("--seed -1", "seed must be an integer >= 0"),
        ("--stop=", "stop must be non-empty strings"),
        ("--stop-token-id -1", "stop_token_ids must be integers >= 0"),
        ("--backend numqy", "'numqy' is neither a backend"),
        ("--backend os", "does not follow the array API"),
        ("--device cuda:7", "NumPy has one device: expected 'cpu'"),
        ("--backend torch --device nowhere", "does not start on device 'nowhere'"),
        ("--dtype int32", "dtype must be one of float32"),
        ("--model no/such/folder", "There is no folder no/such/folder"),
        ("--prompt=", "A prompt must hold at least one token"),
    ],
)
def test_wrong_values_are_explained_in_a_line(run, args, message):
    assert refused(run("generate", "--prompt", "x", *args.split()), message)


@pytest.mark.parametrize(
    "what, message",
    [
        ("no config", "config.json is missing"),
        ("unknown architecture", "which is not registered. Nearest known: LlamaForCausalLM"),
        ("no weights", "No weights in"),
        ("truncated weights", "not a complete safetensors file"),
        ("no tokenizer", "Without a tokenizer the prompt must be token ids; got 'x'"),
        ("other tokenizer", "do not belong together"),
    ],
)
def test_a_damaged_model_is_explained_in_a_line(run, damaged_models, what, message):
    assert refused(run("generate", "--prompt", "x", "--model", str(damaged_models[what])), message)


@pytest.mark.parametrize(
    "module, args, message",
    [
        ("tokenizers", "generate --prompt x", "pip install '.[text]' in the checkout"),
        ("tokenizers", "demo", "pip install '.[text]' in the checkout"),
        ("hibachi_torch", "generate --prompt x --backend torch", "pip install '.[torch]'"),
        ("hibachi_jax", "demo --backend jax", "pip install '.[jax]'"),
    ],
)
def test_a_missing_library_is_explained_in_a_line(run, monkeypatch, module, args, message):
    monkeypatch.setitem(sys.modules, module, None)
    assert refused(run(*args.split()), message)


# ---- generate --------------------------------------------------------------------------------------------------------


def test_generate_writes_the_completion(run, text):
    assert run(*GREEDY, "--prompt", "She was") == (0, f"{text}\n", "")
    assert run(*GREEDY, "--prompt", "She was", "--echo") == (0, f"She was{text}\n", "")
    assert run(*GREEDY, "--prompt", "She was", "--stop", text[3:6]) == (0, f"{text[:3]}\n", "")


def test_the_prompt_comes_from_standard_input(run, text):
    assert run(*GREEDY, stdin="She was") == run(*GREEDY, stdin="She was\n") == (0, f"{text}\n", "")


def test_an_empty_standard_input_is_no_prompt(run):
    for stdin in ("", "\n"):
        assert refused(run(*GREEDY, stdin=stdin), "at least one token; got ''")


def test_a_prompt_over_the_context_is_refused(run):
    assert refused(run(*GREEDY, stdin="word " * 600), "expected at most 511 tokens; got ")


def test_a_seed_gives_the_same_text(run):
    first, again, other = (run("generate", "--prompt", "She", "--seed", seed)[1] for seed in "112")
    assert first == again != other


@pytest.mark.parametrize(
    "model, prompt, out",
    [("SumPaged", "1 2 3", "7 4 8 6"), ("SumState", "1,2,3", "7 4 8 6"), ("Count", "1 2", "3 4 5 6")],
)
def test_a_model_of_the_user_goes_on_from_token_ids(run, model, prompt, out):
    args = [*GREEDY[:3], "--max-tokens", "4", "--model", f"hibachi.testing.toys:{model}"]
    assert run(*args, "--prompt", prompt) == (0, f"{out} \n", "")
    assert run(*args, "--echo", stdin=prompt) == (0, f"{prompt.replace(',', ' ')} {out} \n", "")


def test_a_model_of_the_user_has_no_tokenizer(run):
    args = ["generate", "--model", "hibachi.testing.toys:Count", "--prompt"]
    assert refused(run(*args, "one two"), "Without a tokenizer the prompt must be token ids; got 'one two'")
    assert refused(run(*args[:2], "hibachi.testing.toys:Nobody", "--prompt", "1"), "has no 'Nobody'")


def test_generate_runs_on_other_libraries(run, text):
    assert run(*GREEDY, "--prompt", "She was", "--backend", "torch", "--device", "cpu")[1] == f"{text}\n"


def test_the_text_streams():
    """The first words are there long before the last; the reader may leave, and the writer leaves quietly."""
    args = ["generate", "--prompt", "She was", "--max-tokens", "480", "--ignore-eos"]
    with subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert len(p.stdout.read1(10)) > 0 and p.poll() is None
        p.stdout.close()
        assert (p.wait(60), p.stderr.read()) == (141, b"")


def test_interrupting_it_is_clean():
    args = ["generate", "--prompt", "She was", "--max-tokens", "480", "--ignore-eos"]
    with subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout.read(1)
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=60)
    assert (p.returncode, err) == (130, b"\n")


def test_characters_that_the_output_lacks_are_replaced():
    result = process(*GREEDY, "--prompt", "né", "--echo", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and result.stdout.startswith(b"n?") and not result.stderr


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
def test_bytes_that_are_no_text_are_refused(encoding):
    result = process(*GREEDY, input=b"She\xff", env=os.environ | {"PYTHONIOENCODING": encoding})
    assert refused((result.returncode, result.stdout.decode(), result.stderr.decode()), "must be")


@pytest.mark.parametrize(
    "shell, status, out, err",
    [
        ("<&-", 1, b"", b"hibachi: A prompt must hold at least one token; got ''. Write something in it.\n"),
        (">&-", 0, b"", b""),
        ("> /dev/full", 1, b"", b"hibachi: [Errno 28] No space left on device\n"),
    ],
)
def test_a_stream_that_does_not_work(shell, status, out, err):
    if "/dev/full" in shell and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    prompt = [] if "<" in shell else ["--prompt", "She was"]
    result = process(*GREEDY, *prompt, shell=shell)
    assert (result.returncode, result.stdout, result.stderr) == (status, out, err)


# ---- the other commands ----------------------------------------------------------------------------------------------


def test_doctor_says_what_is_there(run):
    status, out, err = run("doctor")
    assert (status, err) == (0, "") and f"hibachi   {version('hibachi')}\n" in out
    for name in ("numpy", "torch", "jax"):
        assert f"ready    {name} {version(name)}" in out
    for name in ("tokenizers", "minijinja", "gguf", "pytest"):
        assert f"ready    {name} {version(name)}\n" in out


def test_doctor_says_what_is_missing(run, monkeypatch):
    for module in ("hibachi_torch", "tokenizers", "pytest"):
        monkeypatch.setitem(sys.modules, module, None)
    status, out, err = run("doctor")
    assert (status, err) == (0, "")
    assert "  torch  missing  Backend 'torch' needs the module 'hibachi_torch', which is not installed. From the" in out
    assert "  text   missing  tokenizers: pip install '.[text]' in the checkout" in out
    assert "  test   missing  pytest: pip install '.[test]' in the checkout" in out
    assert "  numpy  ready  " in out and "  text   ready    minijinja" in out


def test_doctor_survives_what_is_broken(run, monkeypatch, tmp_path):
    (tmp_path / "minijinja.py").write_text("import nothing_of_this_name")
    (tmp_path / "hibachi_torch.py").write_text("raise OSError('libtorch.so: no such file')")
    for module in ("minijinja", "hibachi_torch"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hibachi.backend.numpy_backend.NumpyBackend.versions", lambda self: 1 / 0)
    status, out, _ = run("doctor")
    assert status == 0 and "torch  missing  OSError: libtorch.so: no such file" in out
    assert "numpy  broken   division by zero" in out
    assert "text   broken   minijinja: No module named 'nothing_of_this_name'" in out


def test_conformance_hands_its_arguments_on(run, monkeypatch):
    seen = []
    monkeypatch.setattr("hibachi.testing.run.main", lambda args: seen.append(args) or 7)
    assert run("conformance", "--backend", "numpy", "--backend=torch", "-k", "pop or cat", "-x")[0] == 7
    assert seen == [["--backend=numpy", "--backend=torch", "-k", "pop or cat", "-x"]]


@pytest.mark.parametrize("words", [("--model", "mine.py:Mine"), ("--model=tiny", "--backend", "numpy")])
def test_conformance_names_the_command_that_judges_models(run, words):
    status, out, err = run("conformance", *words)
    assert (status, out) == (2, "") and "`hibachi verify --model MODEL` judges models" in err


def test_the_demo_in_a_pipe(run):
    status, out, err = run("demo", "--tokens", "6", "--deterministic")
    lines = out.splitlines()
    assert (status, err) == (0, "") and max(map(len, lines)) <= 80
    assert lines[0].startswith("hibachi demo: 16 prompts, a Llama of ")
    for i, prompt in enumerate(demo.PROMPTS):
        assert f"\n{i + 1:2d}  {prompt}" in out
    total = 6 * len(demo.PROMPTS)
    for what in ("16 at once", "one by one"):
        [last] = [line for line in lines if line.startswith(f"{what}  [##########]")]
        assert f"{total}/{total} tokens" in last and "tokens/s" in last
    assert lines[-1].endswith(" times as fast at once; deterministic, equal to a run alone: 16 of 16 texts")


def test_the_demo_without_determinism_counts_equal_texts(run):
    status, out, err = run("demo", "--tokens", "2", "--no-deterministic")
    assert (status, err) == (0, "")
    assert " times as fast at once; the same tokens as alone: " in out.splitlines()[-1] and out.endswith("16 texts\n")


def test_the_demo_fits_its_texts_into_the_context(run, monkeypatch):
    monkeypatch.setattr(demo, "PROMPTS", ("She was", "word " * 505))
    status, out, _ = run("demo", "--tokens", "20")
    assert status == 0 and "one by one  [##########]" in out


def test_the_demo_refuses_a_bad_number_of_tokens(run):
    assert refused(run("demo", "--tokens", "0"), "max_tokens must be an integer >= 1")


def test_the_demo_into_a_pipe_whose_reader_leaves():
    command = " ".join(COMMAND)
    shell = f"({command} demo --tokens 20; echo $? >&2) | head -1"
    result = subprocess.run(["sh", "-c", shell], capture_output=True, timeout=60)
    assert result.stdout.startswith(b"hibachi demo") and result.stderr == b"141\n"


def test_doctor_says_what_an_engine_finds_of_a_model_of_ones_own(run):
    here = Path(__file__).parents[1] / "serve" / "anytoken.py"
    status, out, _ = run("doctor", "--model", f"{here}:Spoken")
    assert status == 0 and "level 0, tokens out" in out and "which gets random numbers by seed" in out
    assert "a request brings speaker: (2,) of float32, per request" in out
    status, out, _ = run("doctor", "--model", f"{here}:Sung")
    assert status == 0 and "frames of 2 ids below 8, drawn by the engine" in out and "any company: yes" in out
    own = Path(__file__).parents[2] / "examples" / "own_cache.py"
    status, out, _ = run("doctor", "--model", f"{own}:Gpt")
    assert status == 0 and "between levels 1 and 2" in out and "its past: 12 arrays" in out
    assert "rows of any length would share calls" in out and "prefixes are copied" in out
    status, out, _ = run("doctor", "--model", f"{here}:Classifier")
    assert status == 0 and "feed-forward" in out


def test_doctor_says_which_kernels_a_model_gets(run, monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = str(tmp_path / "kernels.json")
    args = "doctor", "--model", "tiny", "--backend", "torch", "--device", "cpu", "--kernels", kernels, "--autotune"
    status, out, err = run(*args, "0.2s")
    assert status == 0 and not err
    assert "deterministic: yes" in out and out.count("<- taken") == 5 and "prompt of 256" in out
    assert "shapes are not padded" in out and "float32" in out and "weights lose digits" in out
    status, again, err = run(*args, "off")
    assert status == 0 and again.splitlines()[0] == out.splitlines()[0]  # what the file says is taken
    status, out, err = run("doctor", "--model", "tiny", "--backend", "numpy", "--autotune", "0.1s")
    assert status == 0 and "numerics cpu-2" in out
    assert re.search(r"Checked: \d+ outputs have the same bits alone and beside others", out)
    assert "\ntokens        1       2       4       8      16      32      64\nms " in out
    assert out.count("x the tokens per second") + out.count("no proposals") == 4  # sizes of batches
    status, out, err = run(*args, "soon")
    assert status and "autotune must be 'off', 'full' or seconds" in err
