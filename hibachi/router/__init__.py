"""One door over many servers: which of them gets a request, who waits, and bytes that pass as they are."""
