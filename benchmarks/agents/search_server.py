"""The embedded search over HTTP, for agents in other languages: `GET /?QUERY`. It prints its port."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from mt_grpo.data.embedded.tool import search


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        found = search(unquote(urlsplit(self.path).query)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.request_queue_size = 128
print(server.server_address[1], flush=True)
server.serve_forever()
