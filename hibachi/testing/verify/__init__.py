"""Finds where a model is not safe to batch, and names the reason: behind `hibachi verify`."""

from hibachi.testing.verify.report import Report as Report
from hibachi.testing.verify.report import verify as verify
from hibachi.testing.verify.subject import Subject as Subject
