"""How a token gets from the engine to its consumer, in any thread or event loop."""
