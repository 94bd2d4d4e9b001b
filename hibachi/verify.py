"""`hibachi.testing.verify` under the name by which callers know it."""

from hibachi.testing.verify import Report as Report
from hibachi.testing.verify import Subject as Subject
from hibachi.testing.verify import verify as verify
