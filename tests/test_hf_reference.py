"""The rule by which Hugging Face judges an answer can fail in each of its parts."""

from __future__ import annotations

import pandas as pd
import pytest

from lab.golden import GoldenOutput
from lab.hf_reference import TIE, judge

CASES = {
    # our tokens, margins, gaps, Hugging Face's own tokens (None: not generated), whether it passes
    "equal": ((1, 2, 3), (0, 0, 0), (1, 1, 1), (1, 2, 3), True),
    "not generated": ((1, 2, 3), (0, 0, 0), (1, 1, 1), None, True),
    "parts after a tie": ((1, 2, 3), (0, TIE / 2, 0), (1, TIE / 2, 1), (1, 9, 8), True),
    "parts before the tie": ((1, 2, 3), (0, 0, 0), (1, 1, TIE / 2), (9, 2, 3), False),
    "ends early": ((1, 2, 3), (0, 0, 0), (1, 1, 1), (1, 2), False),
    "off the maximum": ((1, 2, 3), (0, 2 * TIE, 0), (1, 1, 1), (1, 2, 3), False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case: str) -> None:
    tokens, margins, gaps, own, passes = CASES[case]
    forced = pd.DataFrame({"prompt_id": "p", "position": range(3), "token": tokens, "margin": margins, "gap": gaps})
    outputs = {"p": GoldenOutput(tokens, (-1.0,) * 3, "length")}
    row = judge(forced, outputs, {} if own is None else {"p": own}).iloc[0]
    assert row["passed"] == passes and row["worst_margin"] == max(margins)
    assert (row["same_until_tie"] is None) == (own is None)
