"""Finds where a model is not safe to batch, and names the reason: behind `hibachi verify`."""

from hibachi.verify.bench import Bench as Bench
from hibachi.verify.report import Report as Report
from hibachi.verify.report import verify as verify
