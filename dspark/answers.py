"""Exact-match checks of the maths sets: is the boxed answer the right one? Speculation must not change how often."""

import re
from fractions import Fraction


def final_answer(text: str) -> str | None:
    r"""What the last \boxed{...} of an answer holds, braces balanced; None where there is none or it is cut off."""
    at = text.rfind(r"\boxed{")
    if at < 0:
        return None
    depth, begin = 1, at + len(r"\boxed{")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def gold_answer(stated: str) -> str:
    """The answer of a dataset's row: GSM8K's follows its solution after ####."""
    return str(stated).rsplit("####", 1)[-1].strip()


def normal(answer: str) -> str:
    """One spelling of an answer: without spacing, dollar signs, sizes of brackets and thousands separators."""
    answer = re.sub(r"\\(left|right|!|,|;| )|\$|\\%|%|\s|\^\{?\\circ\}?", "", answer.strip().rstrip("."))
    answer = re.sub(r"\\text\{(.*?)\}", r"\1", answer).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", answer)
    return re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", answer)


def is_correct(text: str, stated: str) -> bool:
    """Whether an answer's boxed result equals the dataset's, as text or as a number."""
    found = final_answer(text)
    if found is None:
        return False
    found, wanted = normal(found), normal(gold_answer(stated))
    return found == wanted or (_number(found) is not None and _number(found) == _number(wanted))


def _number(text: str) -> Fraction | None:
    text = re.sub(r"^(-?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", text)
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
