"""What clients ask of a server: by a proxy that notes it."""

import http.client
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PASSED_ON = ("accept", "authorization", "content-type", "x-api-key", "anthropic-version", "anthropic-beta")


@contextmanager
def overheard(url, notes, paths=None):
    """The address of a proxy to `url`. Each request adds its path to the list `paths`, and one with a body adds
    (url, body) to the list `notes`.
    """

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(None)

        def do_DELETE(self):
            self.answer(None)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            notes.append((url, json.loads(body)))
            self.answer(body)

        def answer(self, body):
            if paths is not None:
                paths.append(self.path)
            headers = {name: value for name, value in self.headers.items() if name.lower() in PASSED_ON}
            server = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
            try:
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()  # what follows ends with the connection, as HTTP/1.0 has it
                while piece := answer.read1(65536):
                    self.wfile.write(piece)
            finally:
                server.close()

        def log_message(self, *_):
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        proxy.server_close()


def form_in(body):
    """How a body says what form the answer must have, and the form, as `structured_outputs` has it; None means any."""
    given = body.get("response_format") or body.get("text", {}).get("format")  # of a chat, or of /v1/responses
    if given is not None and given["type"] == "json_schema":
        return "schema", {"json": given.get("json_schema", given)["schema"]}
    if given is not None and given["type"] == "json_object":
        return "object", {"json_object": True}
    assert given is None, given
    if "structured_outputs" in body:
        return "structured", body["structured_outputs"]
    guided = {n.removeprefix("guided_"): v for n, v in body.items() if n.startswith("guided_")}
    guided.pop("decoding_backend", None)
    return ("guided", guided) if guided else ("words", None)
