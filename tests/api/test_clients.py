"""Clients that are no browsers and no Python: HTTP as curl and the JDK speak it, and lm-eval's requests."""

from __future__ import annotations

import json
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.services.service import MODEL, Service, until

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
    "temperature": 0,
}
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl: apt-get install curl")
needs_java = pytest.mark.skipif(
    shutil.which("java") is None, reason="no java: apt-get install default-jdk-headless"
)


def said(body: dict[str, Any]) -> str:
    text: str = body["choices"][0]["message"]["content"]
    return text


def curl(service: Service, *flags: str, body: dict[str, Any] = CHAT) -> tuple[str, str]:
    """Headers and body of one answer."""
    command = ["curl", "-sS", "-i", "--max-time", "60", *flags, f"{service.url}/v1/chat/completions"]
    done = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, check=True)
    head, _, rest = done.stdout.partition("\n\n")  # text: \r\n is \n
    return head, rest


@pytest.fixture(scope="module")
def expected(service: Service) -> str:
    with service.http() as http:
        return said(http.post("/v1/chat/completions", json=CHAT).json())


@needs_curl
@pytest.mark.parametrize("version", ["--http2", "--http1.1", "--http1.0"])
def test_curl_in_every_version_of_http(service: Service, expected: str, version: str) -> None:
    json_type = ("-H", "Content-Type: application/json")
    head, body = curl(service, version, *json_type)
    assert " 200 " in head.splitlines()[0] + " "
    assert said(json.loads(body)) == expected
    head, events = curl(service, version, *json_type, body={**CHAT, "stream": True})
    assert events.rstrip().endswith("data: [DONE]")
    if version == "--http1.0":
        assert "transfer-encoding" not in head.lower()


@needs_curl
def test_curls_default_type_is_415_at_once(service: Service) -> None:
    head, body = curl(service)
    assert head.startswith("HTTP/1.1 415")
    assert "application/json" in json.loads(body)["error"]["message"]


JAVA = """
import java.net.URI;
import java.net.http.*;
import java.nio.file.*;

public class Chat {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();  // offers h2c with its first request
        for (int turn = 0; turn < 3; turn++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0]))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(Files.readString(Path.of(args[1]))))
                .build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version() + " " + answer.body());
        }
    }
}
"""


@needs_java
def test_the_jdks_client_is_served(service: Service, expected: str, tmp_path: Path) -> None:
    source, body = tmp_path / "Chat.java", tmp_path / "body.json"
    source.write_text(textwrap.dedent(JAVA))
    body.write_text(json.dumps(CHAT))
    quick = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")  # it compiles itself, and runs for a second
    command = ["java", *quick, str(source), f"{service.url}/v1/chat/completions", str(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for line in lines:
        status, version, answer = line.split(" ", 2)
        assert (status, version) == ("200", "HTTP_1_1"), line
        assert said(json.loads(answer)) == expected


# Evaluation ----------------------------------------------------------------------------------

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " green"]),
    ("Two plus two is", [" four", " nine", " yesterday"]),
    ("Water freezes at zero degrees", [" Celsius", " Monday", " apples"]),
]
TEXT = "A samovar keeps the tea hot for guests who come back for another cup, all evening long."


class LmEval:
    """Two tiny tasks with the requests that lm-eval's `local-completions` makes, tokenizer included."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokens: dict[str, list[int]] = {}
        self.cached_tokens = 0

    def tokens(self, text: str) -> list[int]:
        if text not in self._tokens:
            told = self._post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
            assert self._post("/detokenize", {"tokens": told}) == {"prompt": text}
            self._tokens[text] = told
        return self._tokens[text]

    def loglikelihood(self, context: list[int], rest: list[int]) -> tuple[float, bool, list[float]]:
        """(sum of log-probabilities, whether greedy, each of them)."""
        body = {
            "model": MODEL,
            "prompt": [[*context, *rest]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = self._post("/v1/completions", body)
        self.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        shown = answer["choices"][0]["logprobs"]
        assert len(shown["token_logprobs"]) == len(context) + len(rest) + 1
        values = shown["token_logprobs"][len(context) : -1]
        best = [max(top.values()) for top in shown["top_logprobs"][len(context) : -1]]
        return sum(values), values == best, values

    def multiple_choice(self) -> list[list[tuple[float, bool, list[float]]]]:
        return [
            [self.loglikelihood(self.tokens(question), self.tokens(choice)) for choice in choices]
            for question, choices in QUESTIONS
        ]

    def rolling(self) -> tuple[float, bool, list[float]]:
        info = self._get("/tokenizer_info")
        return self.loglikelihood(self.tokens(info["eos_token"]), self.tokens(TEXT))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._service.http() as http:
            answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def _get(self, path: str) -> dict[str, Any]:
        with self._service.http() as http:
            told: dict[str, Any] = http.get(path).raise_for_status().json()
        return told


@pytest.mark.guarantee("G14")
def test_l14_an_evaluation_scores_the_same_with_the_cache_cold_and_warm(service: Service) -> None:
    """Log-probabilities are equal bit for bit where the service is exact; the best choices always."""
    harness = LmEval(service)
    cold = (harness.multiple_choice(), harness.rolling())
    warm = (harness.multiple_choice(), harness.rolling())
    with service.http() as http:
        assert http.delete("/v1/cache").status_code == 200
    again = (harness.multiple_choice(), harness.rolling())
    is_exact = service.says_exact()
    for other in (warm, again):
        best = [max(range(3), key=lambda n: row[n][0]) for row in cold[0]]
        assert [max(range(3), key=lambda n: row[n][0]) for row in other[0]] == best
        if is_exact:
            assert other == cold
        else:
            assert other[1][0] == pytest.approx(cold[1][0], abs=0.5)
    assert best[0] == 0, "a model of English prefers Paris to green"
    assert harness.cached_tokens == 0, "whose log-probability is wanted is computed"
    until("the service is idle", service.idle)


@pytest.mark.guarantee("G14")
def test_l14_what_a_score_computed_serves_the_next_one(service: Service) -> None:
    text = "Once upon a time there was a kettle that never got cold. " * 8
    asked = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0, "session_id": "score"}
    with service.http() as http:
        whole = http.post("/v1/completions", json={**asked, "prompt_logprobs": 0}).json()
        after = http.post(
            "/v1/completions", json={**asked, "prompt_logprobs": 0, "logprob_start_len": 70}
        ).json()
    details = after["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 64, "blocks before the first place that is wanted"
    first, second = (body["choices"][0]["prompt_logprobs"] for body in (whole, after))
    assert second[:70] == [None] * 70
    if service.says_exact():
        assert second[70:] == first[70:]
