"""The batch: admission of requests, the order of a step, recovery when it fails, and the thread that takes steps."""
