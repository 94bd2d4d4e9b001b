"""Entry points are looked up once, and again when something was installed."""

import os

from hibachi.common.installed import entry_points


def test_what_is_installed_meanwhile_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not entry_points(group="hibachi.strangers")
    dist = tmp_path / "stranger-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text("[hibachi.strangers]\nodd = os:path\n")
    os.utime(tmp_path, ns=(1, 1))  # as if it had come a while later
    (found,) = entry_points(group="hibachi.strangers")
    assert (found.name, found.value) == ("odd", "os:path") and found.load() is os.path
    assert {e.name for e in entry_points(group="hibachi.backends")} >= {"numpy", "torch", "jax"}
