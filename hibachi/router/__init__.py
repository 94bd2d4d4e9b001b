"""One door over many servers: it chooses the server of a request, queues requests, and passes bytes on unchanged."""
