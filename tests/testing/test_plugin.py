"""`hibachi conformance` and the pytest plugin: which backends run, what the table says, how they fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from hibachi.testing.report import table

WRONG = """
from hibachi import NumpyBackend

class Wrong(NumpyBackend):
    def pop(self, t, dim, index):
        return super().pop(t, dim, (index + 1) % t.shape[dim])

wrong = Wrong()
"""


def test_a_backend_that_keeps_its_promises_passes_with_a_table(conformance):
    status, said = conformance("--backend", "numpy", "-k", "test_tensors or test_invalid")
    assert status == 0
    assert "backend numpy" in said
    assert [line.split()[-1] for line in said.splitlines() if line.startswith("nine operations")] == ["22/22"]
    assert max(map(len, said.splitlines())) <= 80


def test_broken_promises_are_named_with_a_line_to_reproduce_them(conformance, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    status, said = conformance("--backend", "wrong:Wrong", "--backend", "numpy", "-k", "pop")
    assert status == 1
    assert "BROKEN on wrong:Wrong: pop removes exactly one position" in said
    assert "backend.pop(put(np.array([1,2,3,4,5,6],'int32').reshape(2, 3)), 0, 0) gave" in said
    assert "BROKEN on numpy" not in said


@pytest.mark.parametrize("name", ["wrong:Wrong", "wrong:wrong", "array_api_compat.numpy"])
def test_a_backend_may_be_a_class_an_object_or_a_namespace(conformance, tmp_path, name):
    (tmp_path / "wrong.py").write_text(WRONG)
    status, said = conformance("--backend", name, "-k", "repeat or output_of_the_wrong_shape")
    assert status == 0, said


def test_an_ini_file_may_name_the_backends_of_a_project(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nhibachi_backends = numpy array_api_strict\n")
    (tmp_path / "test_it.py").write_text("def test_it(backend):\n    print(backend.name)\n")

    def tested(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "hibachi.testing", "-p", "no:cacheprovider", "-v", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return [line.split("[")[1].split("]")[0] for line in done.stdout.splitlines() if "PASSED" in line]

    assert tested() == ["numpy", "array_api_strict"]
    assert tested("--backend", "numpy") == ["numpy"]


def test_an_unknown_backend_is_an_error_that_names_the_known_ones(conformance):
    status, said = conformance("--backend", "nosuch")
    assert status == 4
    assert "'nosuch'" in said and "numpy" in said
    assert "Traceback" not in said


def test_no_backend_at_all_is_an_error_and_not_a_green_run(conformance):
    hidden = "import sys, hibachi.common.installed as d; d.entry_points = lambda **_: []; "
    run = "import pytest; from hibachi.testing.run import pytest_words; sys.exit(pytest.main(pytest_words([])))"
    status, said = conformance(program=("-c", hidden + run))
    assert status not in (0, 5)
    assert "No backend loads" in said


def test_the_folder_it_runs_in_changes_nothing(conformance, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError")
    status, said = conformance("--backend", "numpy", "-k", "repeat")
    assert status == 0, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conftest.py", "pytest.ini"]


def test_without_pytest_it_says_how_to_install_it(conformance):
    hidden = "import sys; sys.modules['pytest'] = None; "
    program = ("-c", hidden + "from hibachi.testing.run import main; sys.exit(main())")
    status, said = conformance(program=program)
    assert status == 2
    assert "pip install '.[test]'" in said
    assert "Traceback" not in said


def test_many_backends_make_a_table_of_eighty_columns():
    kept = {("a group", f"backend number {i}"): ["kept", "broken" if i == 3 else "kept"] for i in range(9)}
    lines = list(table(kept))
    assert max(map(len, lines)) <= 80
    assert sum(line.count("2/2") for line in lines) == 8
    assert sum(line.count("1/2") for line in lines) == 1


def test_the_suite_imports_no_array_library_and_nothing_private():
    suite = Path(__file__).parents[2] / "conformance"
    for path in suite.glob("*.py"):
        imports = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        modules = {line.split()[1].split(".")[0] for line in imports}
        assert modules <= sys.stdlib_module_names | {"", "numpy", "pytest", "hibachi"}, path.name
        assert not [line for line in imports if line.startswith("from hibachi.") and "testing" not in line], path.name
