"""One answer in the making: what replicas have said so far, for all prompts and choices.

Takes events in, gives numbered deltas out and keeps the totals. Choices are numbered through:
prompt `p` of a request with `n` answers each holds the choices `p*n .. p*n+n-1`. Pure; knows
nothing of HTTP or of where events come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from replicas.messages import Admitted, Delta, Event, Failed, Refused
from router.answer_shape import Choice, Usage
from router.errors import ApiError, InvalidValue, TooManyRequests
from router.prompt import Prompt
from router.receipt import AnswerReceipt, joined
from router.replica_client import ReplicaFailed, ReplicaLost


class Answer:
    """State of one request: `n` choices for each of `prompts`."""

    def __init__(self, prompts: Sequence[Prompt], n: int, retry_after_s: float) -> None:
        self.prompts = prompts
        self._n = n
        self._retry_after_s = retry_after_s
        self._admitted: dict[int, Admitted] = {}
        self._replica_ids: set[str] = set()
        self.home = ""
        """The replica that was the last to take it on: the session's blocks are there."""
        self.choices = [Choice(index) for index in range(n * len(prompts))]

    @property
    def is_admitted(self) -> bool:
        """Whether every prompt is computed, so that the receipt is final."""
        return len(self._admitted) == len(self.prompts)

    @property
    def is_over(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def queue_s(self) -> float:
        """The longest wait of a prompt for its first pages."""
        return max((admitted.queue_s for admitted in self._admitted.values()), default=0.0)

    @property
    def receipt(self) -> AnswerReceipt:
        """Where the prompts' KV came from, as far as they are computed."""
        of_prompts = [
            (admitted.receipt, len(self.prompts[index].token_ids), admitted.cached_tokens)
            for index, admitted in sorted(self._admitted.items())
        ]
        return joined(of_prompts, self.replica_ids)

    @property
    def replica_ids(self) -> list[str]:
        """The replicas that serve it or did until they were lost, each once."""
        return sorted(self._replica_ids)

    @property
    def chain_tokens(self) -> int:
        """Length of the first prompt with its first answer: what the next turn begins with."""
        if not self.prompts:
            return 0
        return len(self.prompts[0].token_ids) + len(self.choices[0].token_ids)

    def usage(self) -> Usage:
        """Totals so far."""
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return Usage(self.prompt_tokens, completion_tokens, self.receipt.by_tier)

    def prompt_of(self, choice: Choice) -> Prompt:
        """The prompt that `choice` answers."""
        return self.prompts[choice.index // self._n]

    def apply(self, prompt_index: int, events: Sequence[Event]) -> list[tuple[int, Delta]]:
        """Take in events of one prompt; (choice index, delta) of those that carry tokens or an end.

        An answer that went on elsewhere is admitted again; what its receipt says is how it began.
        Raises `ApiError` for a refusal, `ReplicaLost` when the replica goes away, and `ReplicaFailed`
        when it gave this request up or broke the protocol of `messages.py`.
        """
        deltas = []
        for event in events:
            if isinstance(event, Refused):
                raise refusal(event, self._retry_after_s)
            if isinstance(event, Failed):
                raise ReplicaLost(event.message) if event.replica_lost else ReplicaFailed(event.message)
            if isinstance(event, Admitted):
                self._admitted.setdefault(prompt_index, event)
                self._replica_ids.add(event.replica_id)
                self.home = event.replica_id
                continue
            if prompt_index not in self._admitted or not 0 <= event.index < self._n:
                raise ReplicaFailed(f"a delta of choice {event.index} of {self._n}, or before its admission")
            choice = self.choices[prompt_index * self._n + event.index]
            if choice.finish_reason is not None:
                raise ReplicaFailed(f"a delta of choice {choice.index} after its end")
            choice.add(event)
            deltas.append((choice.index, event))
        return deltas


def refusal(refused: Refused, retry_after_s: float) -> ApiError:
    """The HTTP error of a replica's refusal."""
    wait_s = retry_after_s if refused.retry_after_s is None else refused.retry_after_s
    if refused.reason == "queue_full":
        return TooManyRequests(refused.message, wait_s, code="queue_full")
    if refused.reason == "invalid":
        return InvalidValue("prompt", refused.message)
    return ApiError(400, refused.message, code="context_length_exceeded")
