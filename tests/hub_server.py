"""A Hub on localhost: the calls with which transformers, PEFT and huggingface_hub push and load repositories."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """`repos` maps a repository to its commits, oldest first: pairs of a hash and the contents of all files."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.unanswered: list[str] = []

    def files(self, repo: str) -> dict[str, bytes]:
        """The newest version of a repository's files."""
        return self.repos[repo][-1][1] if self.repos[repo] else {}

    def commit(self, repo: str, changes: dict[str, bytes]) -> str:
        """Add a commit with these files written over those of the last; its hash."""
        number = f"{repo} {len(self.repos[repo])}"
        sha = hashlib.sha1(number.encode()).hexdigest()
        self.repos[repo].append((sha, self.files(repo) | changes))
        return sha

    def version(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """The commit that a branch or a hash names."""
        commits = self.repos[repo]
        return (
            commits[-1]
            if revision == "main"
            else next(commit for commit in commits if commit[0] == revision)
        )


class Handler(BaseHTTPRequestHandler):
    """Answers one call. Each of the methods below `routes` takes the groups of its address."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self):
        self.route()

    do_HEAD = do_POST = do_GET

    def log_message(self, *args):
        """Say nothing."""

    def route(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self.chunks())
        for method, pattern, answer in self.routes:
            match = re.fullmatch(pattern, self.path.split("?")[0])
            if match and self.command in method:
                if (
                    self.command == "POST"
                    and self.headers.get("Authorization") != "Bearer hf_dummy"
                ):
                    return self.send(401, {"error": "Invalid username or password."})
                if "repo" in match.groupdict() and match["repo"] not in self.server.repos:
                    return self.send(
                        404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
                    )
                return answer(self, **match.groupdict())
        self.server.unanswered.append(f"{self.command} {self.path}")
        return self.send(404, {"error": "Not found"})

    def chunks(self):
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def send(self, status: int, content, headers=()):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def create(self):
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        status = 409 if repo in self.server.repos else 200
        self.server.repos.setdefault(repo, [])
        self.send(status, {"url": f"{self.server.url}/{repo}"})

    def validate_yaml(self):
        self.send(200, {"errors": [], "warnings": []})

    def preupload(self, repo, revision):
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        files = [
            {"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None}
            for path in paths
        ]
        self.send(200, {"files": files})

    def commit(self, repo, revision):
        operations = [json.loads(line) for line in self.body.splitlines()]
        files = [operation["value"] for operation in operations if operation["key"] == "file"]
        sha = self.server.commit(
            repo, {file["path"]: base64.b64decode(file["content"]) for file in files}
        )
        self.send(
            200,
            {
                "commitUrl": f"{self.server.url}/{repo}/commit/{sha}",
                "commitOid": sha,
                "success": True,
            },
        )

    def info(self, repo, revision="main"):
        sha, files = self.server.version(repo, revision)
        siblings = [{"rfilename": path} for path in files]
        self.send(
            200,
            {
                "id": repo,
                "modelId": repo,
                "sha": sha,
                "private": False,
                "siblings": siblings,
                "tags": [],
            },
        )

    def tree(self, repo, revision):
        _, files = self.server.version(repo, revision)
        self.send(
            200,
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for path, content in files.items()
            ],
        )

    def resolve(self, repo, revision, path):
        if not self.server.repos[repo]:  # created, nothing pushed yet
            return self.send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        sha, files = self.server.version(repo, revision)
        if path not in files:
            return self.send(
                404,
                {"error": "Entry not found"},
                {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha},
            )
        etag = hashlib.sha1(files[path]).hexdigest()
        return self.send(200, files[path], {"ETag": f'"{etag}"', "X-Repo-Commit": sha})

    def harnesses(self):
        self.send(404, {"error": "Not found"})

    model = r"/api/models/(?P<repo>[^/]+/[^/]+)"
    routes = (
        ("GET", "/api/agent-harnesses", harnesses),
        ("POST", "/api/repos/create", create),
        ("POST", "/api/validate-yaml", validate_yaml),
        ("POST", model + "/preupload/(?P<revision>[^/]+)", preupload),
        ("POST", model + "/commit/(?P<revision>[^/]+)", commit),
        ("GET", model, info),
        ("GET", model + "/revision/(?P<revision>[^/]+)", info),
        ("GET", model + "/tree/(?P<revision>[^/]+)", tree),
        ("HEAD GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
    )


@contextlib.contextmanager
def serve():
    """Run a Hub for as long as the block lasts."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
