"""How many lines of the training loop change when a replica becomes several ranks under FSDP2.

    python benchmarks/loop_lines.py

Compares the loops of `examples/train_gpt.py` and `examples/train_hsdp.py`, from `with run:` on, comments aside. Prints the
lines that differ; exits 1 if there are more than 5.
"""
from __future__ import annotations

import difflib
import sys

import common

BAR = 5


def loop(name: str) -> list[str]:
    """From `with run:` to the end of `main`, without comments."""
    lines = (common.ROOT / "examples" / name).read_text().splitlines()
    start = lines.index("    with run:")
    end = next(n for n in range(start, len(lines)) if lines[n] and not lines[n].startswith(" "))
    return [line.split("  #")[0].rstrip() for line in lines[start:end] if line.strip()]


def differing() -> list[tuple[str, str]]:
    """(line of train_gpt.py, line of train_hsdp.py), either "" where the other has no counterpart."""
    before, after = loop("train_gpt.py"), loop("train_hsdp.py")
    found: list[tuple[str, str]] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            left, right = before[a:b], after[c:d]
            length = max(len(left), len(right))
            found += zip(left + [""] * (length - len(left)), right + [""] * (length - len(right)), strict=True)
    return found


def main() -> int:
    found = differing()
    for old, new in found:
        print(f"- {old.strip()}\n+ {new.strip()}")
    common.record("loop_lines", f"at most {BAR} lines differ", len(found) <= BAR, {},
                  {"differing": len(found), "lines": len(loop("train_gpt.py"))})
    print(f"{len(found)} lines of {len(loop('train_gpt.py'))} differ")
    return int(len(found) > BAR)


if __name__ == "__main__":
    sys.exit(main())
