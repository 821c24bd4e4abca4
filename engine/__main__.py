"""Generate from the shell: ``python -m engine "prompt"``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engine import LLM, EngineConfig, SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0 done, 2 refused, 130 interrupted)."""
    parser = argparse.ArgumentParser(prog="python -m engine", description="Generate text from a prompt.")
    parser.add_argument("prompt", nargs="+", help="one or more prompts")
    parser.add_argument("--model", default="smollm2-135m", help="name, Hugging Face folder or hub name (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (%(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the draws")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of answering it as a chat")
    args = parser.parse_args(argv)
    try:
        params = SamplingParams(args.max_tokens, args.temperature, args.top_p, args.seed)
        llm = LLM(args.model, EngineConfig(dtype=args.dtype))
        prompts = [text if args.raw else [{"role": "user", "content": text}] for text in args.prompt]
        if len(prompts) == 1:
            for token in llm.stream(prompts[0], params):
                print(token.text, end="", flush=True)
            print()
            return 0
        for text, output in zip(args.prompt, llm.generate(prompts, params), strict=True):
            print(f"--- {text}\n{output.text}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
