"""Wire shapes: what a request may say, what an answer looks like. No sockets, no engine."""
