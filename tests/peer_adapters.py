"""Peers made for the tests, run by the real host in a real process."""

import os
import time
from collections.abc import Sequence

from lab.peers.adapter import Adapter, Settings, Token


class Fake(Adapter):
    """Serves all that was submitted, a token each in a step; a request's tokens follow from its prompt."""

    def start(self, settings: Settings) -> dict[str, str]:
        print("noise on the standard output", flush=True)
        self.settings = settings
        self.running: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}
        return {"versions": "fake 1", "options": str(dict(settings.options)), "variable": os.environ.get("FAKE", "")}

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> None:
        self.running[request_id], self.left[request_id] = list(prompt), max_tokens

    def next_token(self, tokens: list[int]) -> int:
        return sum(tokens) % 97

    def step(self) -> list[Token]:
        tokens = []
        chosen = {name: self.next_token(context) for name, context in self.running.items()}
        for name, token_id in chosen.items():
            self.running[name].append(token_id)
            self.left[name] -= 1
            tokens.append(Token(name, token_id, time.perf_counter(), self.left[name] == 0))
        self.running = {name: context for name, context in self.running.items() if self.left[name]}
        return tokens

    def reset(self) -> None:
        assert not self.running


class Sociable(Fake):
    """Answers otherwise in company."""

    def next_token(self, tokens: list[int]) -> int:
        return (super().next_token(tokens) + (len(self.running) > 1)) % 97


class Dying(Fake):
    """Ends its process in the first step."""

    def step(self) -> list[Token]:
        print("last words")
        os._exit(3)


class Failing(Fake):
    """Raises in every step."""

    def step(self) -> list[Token]:
        raise ArithmeticError("out of numbers")


class Unstartable(Fake):
    """Does not start."""

    def start(self, settings: Settings) -> dict[str, str]:
        raise ImportError("no such library")


class Slow(Fake):
    """Takes 50 ms a step."""

    def step(self) -> list[Token]:
        time.sleep(0.05)
        return super().step()


class Short(Fake):
    """Ends every request after a token."""

    def step(self) -> list[Token]:
        tokens = [token._replace(is_last=True) for token in super().step()]
        self.running = {}
        return tokens
