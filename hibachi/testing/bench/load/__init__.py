"""A server under load: requests at their times, and what their users saw."""
