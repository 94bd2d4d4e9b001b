"""For tests: the pytest plugin behind `hibachi conformance` (use it with `-p hibachi.testing`).

It brings the option `--backend`, the fixture `backend` and a table of the promises that each backend kept.
"""

pytest_plugins = ("hibachi.testing.plugin",)  # by name, so that this package imports without pytest
