"""Two answers to one question, from a 16-bit and a few-bit cache, as events while they grow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import SequenceMatcher
from queue import SimpleQueue
from typing import Any

import torch

from duotone.demo.turns import Turns
from duotone.inference.batch import (
    EMBEDDABLE_FAMILIES,
    Batch,
    ask_later,
    decode_answers,
    encode,
    generate,
    make_cache,
    prepare,
    read_pictures,
)
from duotone.inference.compare import Prompt, check_scheme_fits
from duotone.inference.memory import cache_memory
from duotone.loading import Loaded

Event = dict[str, Any]
SIDES = ("16 bit", "scheme")


class _Step:
    """A stopping criterion of one side: reports each token, then lets the other side go."""

    def __init__(
        self, side: int, turns: Turns, report: Callable[[list[int]], None], prompt_tokens: int
    ) -> None:
        self.side, self.turns, self.report = side, turns, report
        self.prompt_tokens = prompt_tokens
        self.is_stopped = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Report the tokens so far; stop where nobody listens any more."""
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        with self.turns.paused(self.side):
            self.report(input_ids[0, self.prompt_tokens :].tolist())
        stopped = self.is_stopped.is_set()
        return torch.full((len(input_ids),), stopped, device=input_ids.device)


class Answers:
    """Events of questions to one model, one question at a time.

    max_new_tokens: of each answer.
    """

    def __init__(self, loaded: Loaded, max_new_tokens: int) -> None:
        self.loaded, self.max_new_tokens = loaded, max_new_tokens
        self._is_free = threading.Lock()

    @property
    def can_ask_later(self) -> bool:
        """True for models that can read a question after the pictures were quantized."""
        return self.loaded.model.config.model_type in EMBEDDABLE_FAMILIES

    def ask(self, prompt: Prompt, spec: Any, later_question: bool) -> Iterator[Event]:
        """Answer from both caches; yields events, whose `event` says what happened.

        `waiting`: another question runs. `start`: tokens of the prompt. `token`: one side's text,
        own seconds and bytes. `end`: one side's final numbers. `failed`: one side's error. `done`:
        the two answers compared.
        later_question: read the question after the pictures were quantized.
        Errors: ValueError for a prompt or a spec that does not fit the model.
        """
        check_scheme_fits(self.loaded, spec, bool(prompt.images))
        messages = prompt.messages()
        if not self._is_free.acquire(blocking=False):
            yield {"event": "waiting"}
            self._is_free.acquire()
        try:
            # Tokenizers take one thread at a time.
            batch = prepare(self.loaded.model, encode(self.loaded.processor, [messages]))
            if later_question:
                batch = read_pictures(self.loaded.model, ask_later(batch))
            yield _start(batch)
            yield from self._race(batch, spec)
        finally:
            self._is_free.release()

    def _race(self, batch: Batch, spec: Any) -> Iterator[Event]:
        """Run both sides in threads of their own; yields their events."""
        events: SimpleQueue[Event] = SimpleQueue()
        turns, specs = Turns(len(SIDES)), (None, spec)
        sides = [_Side(self, i, batch, spec, turns, events.put) for i, spec in enumerate(specs)]
        threads = [threading.Thread(target=side.run, daemon=True) for side in sides]
        for thread in threads:
            thread.start()
        ends: dict[int, Event] = {}
        try:
            while len(ends) < len(sides):
                event = events.get()
                if event["event"] in ("end", "failed"):
                    ends[event["side"]] = event
                yield event
            yield _compared(*(ends[side].get("text") for side in range(len(sides))))
        finally:
            for side in sides:
                side.step.is_stopped.set()
            for thread in threads:
                thread.join()


class _Side:
    """One answer: its thread's work, and the events that it puts."""

    def __init__(
        self,
        answers: Answers,
        side: int,
        batch: Batch,
        spec: Any,
        turns: Turns,
        put: Callable[[Event], None],
    ) -> None:
        self.answers, self.side, self.batch, self.spec = answers, side, batch, spec
        self.turns, self.put = turns, put
        prompt_tokens = 0 if batch.is_embedded else batch.attention_mask.shape[1]
        self.step = _Step(side, turns, self._token, prompt_tokens)
        self.cache: Any = None
        self.ids: list[int] = []
        self.seconds: list[float] = []

    def run(self) -> None:
        """Answer; every error becomes an event, so that nobody waits for ever."""
        try:
            with self.turns.lane(self.side), self._enabled():
                self._generate()
                end = {"event": "end", "side": self.side, **self._numbers(), **self._memory()}
            self.put(end)
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            self.put({"event": "failed", "side": self.side, "message": message})
        finally:
            self.cache = None

    def _generate(self) -> None:
        loaded = self.answers.loaded
        self.cache = make_cache(loaded.model, self.spec, self.batch)
        tokens = self.answers.max_new_tokens
        generate(loaded.model, self.batch, self.cache, tokens, stopping=[self.step])

    def _enabled(self) -> AbstractContextManager[Any]:
        """A block of `enable`, whose decode steps are CUDA graphs where they can be."""
        if self.spec is None:
            return nullcontext()
        from duotone.hf import enable

        visual = self.batch.visual_mask
        return enable(self.answers.loaded.model, self.spec, visual_mask=visual)

    def _token(self, ids: list[int]) -> None:
        self.ids = ids
        self.seconds.append(self.turns.seconds[self.side])
        stored = cache_memory(self.cache)["total_bytes"]
        self.put({"event": "token", "side": self.side, **self._numbers(), "bytes": stored})

    def _numbers(self) -> Event:
        (text,) = decode_answers(self.answers.loaded.processor, [self.ids])
        # The last bytes of a letter may be in the next token.
        numbers = {"text": text.rstrip("\ufffd"), "tokens": len(self.ids)}
        numbers["seconds"] = self.seconds[-1] if self.seconds else 0.0
        if len(self.seconds) > 1:
            spent = self.seconds[-1] - self.seconds[0]
            numbers["ms_per_token"] = 1e3 * spent / (len(self.seconds) - 1)
        return numbers

    def _memory(self) -> Event:
        memory = cache_memory(self.cache)
        return {"bytes": memory["total_bytes"], "memory": memory}


def _start(batch: Batch) -> Event:
    tokens = int(batch.attention_mask.sum())
    return {"event": "start", "tokens": tokens, "visual_tokens": int(batch.visual_mask.sum())}


def _compared(reference: str | None, answer: str | None) -> Event:
    if reference is None or answer is None:
        return {"event": "done", "same": None, "words": []}
    return {"event": "done", "same": reference == answer, "words": marked(reference, answer)}


def marked(reference: str, answer: str) -> Sequence[tuple[str, bool]]:
    """Words of an answer; True at those that the reference lacks."""
    words = answer.split()
    matcher = SequenceMatcher(a=reference.split(), b=words, autojunk=False)
    return [
        (word, operation != "equal")
        for operation, _, _, start, end in matcher.get_opcodes()
        for word in words[start:end]
    ]
