"""A hub on this machine: the endpoints that huggingface_hub asks when it downloads, over real HTTP."""

import hashlib
import json
import threading
import urllib.parse
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """Serves one repository; `requests` lists (method, path), a file named in `hold` stops half-way until
    `release` is set."""

    def __init__(self, repository: str, files: dict[str, bytes]):
        self.repository = repository
        self.files = files
        self.requests: list[tuple[str, str]] = []
        self.hold: str | None = None
        self.held, self.release = threading.Event(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def downloads(self) -> Counter[str]:
        """How often each file was asked for."""
        prefix = f"/{self.repository}/resolve/{COMMIT}/"
        return Counter(
            path.removeprefix(prefix)
            for method, path in self.requests
            if method == "GET" and path.startswith(prefix)
        )


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repository, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        if repository == "org/gated":
            return self._refuse(403, "GatedRepo")
        if repository != self.hub.repository:
            return self._refuse(404, "RepoNotFound")
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if api:
            listing = self._tree() if rest[:1] == ["tree"] else self._info()
            return self._send(json.dumps(listing).encode(), "listing", "application/json")
        name = "/".join(rest[2:])
        if name not in self.hub.files:
            return self._refuse(404, "EntryNotFound")
        return self._send(self.hub.files[name], name, "application/octet-stream")

    def _info(self) -> dict:
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": _hash(content)[:40]}
            | ({"lfs": {"size": len(content), "sha256": _hash(content), "pointerSize": 134}} if lfs else {})
            for name, content in self.hub.files.items()
            for lfs in [name.endswith(".safetensors")]
        ]
        return {"id": self.hub.repository, "sha": COMMIT, "siblings": siblings}

    def _tree(self) -> list[dict]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": _hash(content)[:40]}
            for name, content in self.hub.files.items()
        ]

    def _send(self, content: bytes, name: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_hash(content)[: 64 if name.endswith(".safetensors") else 40]}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(content) // 2 if name == self.hub.hold else 0
        self.wfile.write(content[:half])
        self.wfile.flush()
        if half:
            self.hub.held.set()
            self.hub.release.wait(30)
        self.wfile.write(content[half:])

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
