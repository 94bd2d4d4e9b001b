"""The production scheduler under a virtual clock: replays traces of requests without a model."""
