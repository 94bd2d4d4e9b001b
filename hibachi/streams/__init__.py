"""How a token gets from the engine to who waits for it, in any thread or event loop."""
