"""The HTTP contract of text-generation-inference (TGI): bodies, rules, events and answers. No sockets, no engine."""
