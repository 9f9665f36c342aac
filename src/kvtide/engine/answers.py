"""The text side of running requests: tokens in, text pieces and finished outputs out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.engine.detokenize import Decode, Detokenizer
from kvtide.engine.request import Delta, FinishReason, Request, RequestId, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Sequence


class Answers:
    """Texts of the requests that are not finished, and outputs of those that are until taken."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[RequestId, Detokenizer] = {}
        self._outputs: dict[RequestId, RequestOutput] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether the request has finished and its output was not taken yet."""
        return request_id in self._outputs

    def open(self, request: Request) -> None:
        """Expect tokens of `request`."""
        self._texts[request.id] = Detokenizer(
            self._decode, context=request.prompt[-8:].tolist(), stops=request.params.stop
        )

    def push(self, request: Request, token: int) -> Delta:
        """Take one token. A token that stops the request (end of turn) adds no text."""
        stops = request.finish is FinishReason.STOP
        text = "" if stops else self._texts[request.id].push(token)
        return Delta(request_id=request.id, text=text, token_ids=(token,))

    def met_stop(self, request: Request) -> bool:
        """Whether a stop string has ended the text."""
        return self._texts[request.id].stopped_by is not None

    def finish(self, request: Request) -> Delta:
        """Store the output of a finished request; returns the text that was still held back."""
        assert request.finish is not None, f"request {request.id} has not finished"
        text = self._texts.pop(request.id)
        rest = text.flush()
        self._outputs[request.id] = RequestOutput(
            request_id=request.id,
            prompt_token_ids=tuple(request.prompt.tolist()),
            token_ids=tuple(request.output),
            text=text.text,
            finish=request.finish,
            error=request.error,
            hit_tokens=request.hit_tokens,
            recomputed_tokens=request.recomputed_tokens,
            num_preempted=request.num_preempted,
        )
        return Delta(request_id=request.id, text=rest, token_ids=(), finish=request.finish)

    def take(self, request_id: RequestId) -> RequestOutput | None:
        """Remove and return an output; None if the request has not finished."""
        return self._outputs.pop(request_id, None)


def merge(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta per request, in the order of their first."""
    merged: dict[RequestId, Delta] = {}
    for delta in deltas:
        before = merged.get(delta.request_id)
        merged[delta.request_id] = delta if before is None else _joined(before, delta)
    return list(merged.values())


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(
        request_id=first.request_id,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        finish=second.finish,
    )
