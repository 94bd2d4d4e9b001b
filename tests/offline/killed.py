"""Runs `hibachi run-batch` in forks of itself, which are ended where a test says; see the fixture `runs` of the tests.

Reads jobs from standard input, a line of JSON each, and answers each with a line: the exit status, negative for a
signal. A job: argv, cwd; kill_at: the place (see `Places`) at which the run ends itself by SIGKILL; kill_after: seconds
after which it is killed; signals: [(place, name of a signal that it sends itself there), ...]; most: bytes that a file
of its may have; log: a file for the names of all places that were passed; env: variables.
"""

import builtins
import io
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path


class Places:
    """Counts the places where a file changes hands. At one of them this process is killed."""

    def __init__(self, kill_at, signals):
        self._kill_at, self._signals, self.names = kill_at, [*signals], []

    def at(self, name, torn=None):
        """torn: leaves a file as it is while it is written."""
        self.names.append(name)
        if self._kill_at in (len(self.names) - 1, name):
            if torn is not None:
                torn()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._signals and self._signals[0][0] == name:
            os.kill(os.getpid(), signal.Signals[self._signals.pop(0)[1]])

    def watch(self):
        from hibachi.offline import drive, output
        from hibachi.offline.journal import Journal
        from hibachi.offline.tasks import text_task

        def opened(path, mode="r", *rest, **more):
            file = real_open(path, mode, *rest, **more)
            if isinstance(path, (str, Path)) and mode[0] in "wax" and Path(path).parent == Path.cwd():
                self.at(f"opened {Path(path).suffix}")
            return file

        def synced(file):
            what = Path(os.readlink(f"/proc/self/fd/{file}"))
            name = "folder" if what.is_dir() else what.suffix
            self.at(f"before fsync {name}")
            real_fsync(file)
            self.at(f"after fsync {name}")

        def replaced(old, new):
            self.at(f"before rename {Path(new).suffix}")
            real_replace(old, new)
            self.at(f"after rename {Path(new).suffix}")

        def line(journal, entry):
            before = journal.size
            real_line(journal, entry)

            def torn():
                journal.flush()
                os.truncate(journal.path, before + (journal.size - before) // 2)

            self.at(f"in a line of {entry[0]}", torn)

        def written(own, row):
            real_row(own, row)
            if own.written % 10 == 5:
                self.at("writing", own.writer.close if own.written % 20 == 5 else None)

        def ran(own):
            real_run(own)
            self.at("all computed")

        def loads(own):
            self.at("loading")
            return real_load(own)

        real_open, real_fsync, real_replace = builtins.open, os.fsync, os.replace
        real_line, real_row, real_run = Journal.write, output.Output.write, drive.Drive.run
        real_load, text_task.TextTask.open = text_task.TextTask.open, loads
        builtins.open = io.open = opened
        os.fsync, os.replace = synced, replaced
        Journal.write, output.Output.write, drive.Drive.run = line, written, ran


def run(job):
    """In a fork. Returns the exit status."""
    os.environ |= {"SOURCE_DATE_EPOCH": "1700000000", **job.get("env", {})}
    os.chdir(job["cwd"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number else 0))
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "rw"[n > 0], closefd=False) for n in range(3))
    if most := job.get("most"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    places = Places(job.get("kill_at"), job.get("signals", ()))
    places.watch()
    try:
        status = main(["run-batch", *job["argv"]])
    except SystemExit as e:
        status = e.code
    places.at("before the exit")
    sys.stdout.flush()
    sys.stderr.flush()
    if log := job.get("log"):
        Path(log).write_text("\n".join(places.names))
    return status


def serve():
    for text in sys.stdin:
        job = json.loads(text)
        pid = os.fork()
        if not pid:
            status = 99
            try:
                status = run(job)
            except BaseException as e:
                print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        timer = threading.Timer(job.get("kill_after", 100), os.kill, (pid, signal.SIGKILL))
        timer.start()
        _, status = os.waitpid(pid, 0)
        timer.cancel()
        timer.join()
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    from hibachi.cli import runbatch  # noqa: F401 - loaded once, and not in each fork
    from hibachi.cli.main import main

    serve()
