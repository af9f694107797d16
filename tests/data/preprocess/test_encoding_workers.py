"""Ctrl-C does not interrupt the calls of the pool of workers, whose locks it would leave taken."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.preprocess import encoding_workers
from megatron_zpp.data.preprocess.document_encoder import DocumentEncoder, EncodedBatch
from megatron_zpp.data.preprocess.encoding_workers import encoded_batches
from megatron_zpp.data.preprocess.json_lines import LineBatch
from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer

ENCODED = EncodedBatch({}, [], 1, 3)


class InterruptedFuture(Future[EncodedBatch]):
    """A future during whose result signals arrive. ended: calls that came to their end."""

    def __init__(self, signals: int, ended: list[str]) -> None:
        super().__init__()
        self._signals = signals
        self._ended = ended

    def result(self, timeout: float | None = None) -> EncodedBatch:
        interrupt(self._signals)
        self._ended.append("result")
        return ENCODED


class InterruptedPool:
    """A pool during whose calls signals arrive: so many in `submit`, and in the result of what was submitted."""

    def __init__(self, in_submit: int, in_result: int) -> None:
        self._in_submit, self._in_result = in_submit, in_result
        self.ended: list[str] = []

    def submit(self, *_: object) -> InterruptedFuture:
        interrupt(self._in_submit)
        self.ended.append("submit")
        return InterruptedFuture(self._in_result, self.ended)

    def shutdown(self, *, cancel_futures: bool) -> None:
        self.ended.append("shutdown")


def interrupt(signals: int) -> None:
    for _ in range(signals):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, whatever the tests were started with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("in_submit", "in_result", "ended"),
    [
        (1, 0, ["submit", "shutdown"]),
        (0, 1, ["submit", "result", "shutdown"]),
        (2, 0, ["shutdown"]),  # a second Ctrl-C does not wait for a call that may never end
    ],
)
def test_an_interruption_waits_for_the_end_of_a_call_of_the_pool(
    monkeypatch: pytest.MonkeyPatch, in_submit: int, in_result: int, ended: list[str]
) -> None:
    pool = InterruptedPool(in_submit, in_result)
    monkeypatch.setattr(encoding_workers, "ProcessPoolExecutor", lambda *_, **__: pool)
    encoder = DocumentEncoder(("text",), build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=10)), False)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        list(encoded_batches(encoder, iter([LineBatch(0, 0, b"{}\n", 3)]), workers=2))
    assert pool.ended == ended
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
