"""The batch: who is let in, the order of a step, what is undone when it fails, and the thread that takes steps."""
